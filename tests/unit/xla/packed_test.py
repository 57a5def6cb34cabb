"""Packing in 8 bits by XLA against numpy and ml_dtypes, byte by byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import xla
from loka_jax.fp8 import E4M3
from loka_jax.packed import Packing
from tests import support

PACKINGS = [Packing(1000, 3, 64), Packing(1000, 3, 64, "e4m3"), Packing(5, 1, 32)]
packings = pytest.mark.parametrize("packing", PACKINGS, ids=str)
pack, sum_packed = (jax.jit(f, static_argnums=1) for f in (xla.pack, xla.sum_packed))
unpack = jax.jit(xla.unpack, static_argnums=(1, 2))


def values(packing, seed=0):
    """Returns values whose blocks differ by orders of magnitude, one of them zeros."""
    x = np.array(support.normal(packing.size, seed=seed))
    block = np.arange(packing.size) // packing.block
    return x * 10.0 ** (-(block % 11)).astype(np.float32) * (block != 2)


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
        codes = scaled.astype(E4M3)
    factors = np.float32(1) / scale
    return codes.reshape(packing.parts, -1), factors.reshape(packing.parts, -1)


@packings
def test_bytes_are_codes_and_then_factors(packing):
    x = values(packing)
    out = np.asarray(pack(jnp.asarray(x), packing))
    assert out.shape == (packing.parts, packing.row_bytes) and out.dtype == np.uint8
    codes, factors = packed_by_numpy(x, packing)
    ours = out[:, : packing.part].view(codes.dtype).astype(np.float32)
    # A quotient that is off by an ulp may be rounded to the code beside.
    unlike = ours != codes.astype(np.float32)
    assert np.mean(unlike) < 1e-2
    steps = np.abs(out[:, : packing.part].view(np.int8) - codes.view(np.int8))
    assert np.all(steps <= 1)
    ours = np.ascontiguousarray(out[:, packing.part :]).view("<f4")
    np.testing.assert_allclose(ours, factors, rtol=2**-22)


@packings
def test_rows_are_unpacked_and_summed(packing):
    rows = [pack(jnp.asarray(values(packing, seed=i)), packing) for i in range(3)]
    parts = []
    for row in map(np.asarray, rows):
        codes = row[:, : packing.part]
        codes = codes.view({"int8": np.int8}.get(packing.format, E4M3))
        factors = np.ascontiguousarray(row[:, packing.part :]).view("<f4")
        whole = codes.astype(np.float64) * np.repeat(factors, packing.block, axis=1)
        parts.append(whole)
    vectors = [whole.ravel()[: packing.size] for whole in parts]
    y = np.asarray(unpack(rows[0], packing, jnp.float32))
    np.testing.assert_allclose(y, vectors[0], rtol=2**-23)
    narrow = unpack(rows[0], packing, jnp.bfloat16)
    np.testing.assert_array_equal(narrow, jnp.asarray(y).astype(jnp.bfloat16))
    total = np.asarray(unpack(jnp.concatenate(rows), packing, jnp.float32))
    magnitude = np.sum(np.abs(vectors), axis=0)
    assert np.all(np.abs(total - np.sum(vectors, axis=0)) <= 2.0**-22 * magnitude)
    # Of the parts of one vector, packed again.
    expected, summed = parts[1].sum(0), sum_packed(rows[1], packing)
    one = Packing(packing.part, 1, packing.block, packing.format)
    amax = np.repeat(np.abs(expected).reshape(-1, packing.block).max(1), packing.block)
    half = {"int8": 0.5 / 127, "e4m3": 16 / 448}[packing.format]
    error = np.abs(np.asarray(unpack(summed, one, jnp.float32)) - expected)
    assert summed.shape == (1, packing.row_bytes) and np.all(
        error <= 1.001 * half * amax
    )


def test_rows_are_whole_words_of_whole_blocks():
    packing = Packing(size=1_000, parts=8, block=32)
    assert (packing.blocks, packing.part, packing.row_bytes) == (4, 128, 144)
    for options in (dict(block=100), dict(size=0), dict(parts=0)):
        with pytest.raises(ValueError, match="must be (one of|at least 1)"):
            Packing(**{"size": 10, "parts": 2} | options)


def test_a_fault_makes_its_block_nan_and_no_other():
    for packing, fault in ((PACKINGS[0], np.nan), (PACKINGS[1], -np.inf)):
        x = values(packing)
        x[200] = fault
        y = unpack(pack(jnp.asarray(x), packing), packing, jnp.float32)
        block = np.arange(packing.size) // packing.block
        np.testing.assert_array_equal(np.isnan(y), block == 200 // packing.block)
