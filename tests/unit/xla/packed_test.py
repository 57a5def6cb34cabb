"""Packing in 8 bits by XLA against numpy and ml_dtypes, byte by byte."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from loka_jax import xla
from loka_jax.packed import Packing
from tests import support

PACKINGS = [Packing(1000, 3, 64), Packing(1000, 3, 64, "e4m3"), Packing(5, 1, 32)]
packings = pytest.mark.parametrize("packing", PACKINGS, ids=str)


def packed_by_numpy(x, packing):
    """Returns codes and factors [n, k b], [n, k]."""
    blocks = np.zeros((packing.parts * packing.blocks, packing.block), np.float32)
    blocks.ravel()[: packing.size] = x
    amax = np.abs(blocks).max(1, keepdims=True)
    limit = np.float32(127 if packing.format == "int8" else 448)
    # The least normal float32, twice over, keeps zeros and their factors finite.
    scale = limit / np.maximum(amax, 2 * limit * np.float32(2.0**-126))
    if packing.format == "int8":
        codes = np.rint(blocks * scale).astype(np.int8)
    else:
        scaled = np.clip(blocks * scale, -limit, limit)
        codes = scaled.astype(ml_dtypes.float8_e4m3fn)
    factors = np.float32(1) / scale
    return codes.reshape(packing.parts, -1), factors.reshape(packing.parts, -1)


@packings
def test_bytes_are_codes_and_then_factors(packing):
    x = np.asarray(support.normal(packing.size))
    out = np.asarray(xla.pack(jnp.asarray(x), packing))
    assert out.shape == (packing.parts, packing.row_bytes) and out.dtype == np.uint8
    codes, factors = packed_by_numpy(x, packing)
    np.testing.assert_array_equal(out[:, : packing.part], codes.view(np.uint8))
    # Quotients may be off by an ulp each.
    ours = np.ascontiguousarray(out[:, packing.part :]).view("<f4")
    np.testing.assert_allclose(ours, factors, rtol=2**-22)


@packings
def test_it_comes_back_within_half_a_step(packing):
    x = np.asarray(support.normal(packing.size))
    y = np.asarray(xla.unpack(xla.pack(jnp.asarray(x), packing), packing))
    codes, factors = packed_by_numpy(x, packing)
    exact = codes.astype(np.float64) * np.repeat(factors, packing.block, axis=1)
    np.testing.assert_allclose(y, exact.ravel()[: packing.size], rtol=2**-21)
    padded = np.zeros(packing.parts * packing.part, np.float32)
    padded[: packing.size] = x
    amax = np.repeat(np.abs(padded).reshape(-1, packing.block).max(1), packing.block)
    half = {"int8": 0.5 / 127, "e4m3": 16 / 448}[packing.format]
    assert np.all(np.abs(y - x) <= 1.001 * half * amax[: packing.size])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(block=100), "block=100 must be one of"),
        (dict(size=0), "must be at least 1"),
        (dict(parts=0), "must be at least 1"),
    ],
)
def test_bad_packings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Packing(**{"size": 10, "parts": 2} | options)


def test_rows_are_whole_words():
    packing = Packing(size=1_000, parts=8, block=32)
    assert (packing.blocks, packing.part, packing.row_bytes) == (4, 128, 144)
    assert Packing(2**30, 8).row_bytes * 8 == 2**30 // 128 * 132
