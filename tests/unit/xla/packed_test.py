"""Packing in 8 bits by XLA against numpy and ml_dtypes, from its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import xla
from loka_jax.fp8 import E4M3
from loka_jax.packed import Packing
from tests import support

PACKINGS = [Packing(1000, 3, 64), Packing(1000, 3, 64, "e4m3"), Packing(5, 1, 32)]
pack, sum_packed = (jax.jit(f, static_argnums=1) for f in (xla.pack, xla.sum_packed))
unpack = jax.jit(xla.unpack, static_argnums=(1, 2))
HALF_STEPS = {"int8": 0.5 / 127, "e4m3": 16 / 448}  # of a block's largest value


def blocks_of(x, packing):
    """Returns a vector as blocks, the last ones with zeros behind it."""
    count = packing.parts * packing.blocks
    return np.pad(x, (0, count * packing.block - len(x))).reshape(count, -1)


def decoded(packed, packing):
    """Returns the float64 blocks that rows of codes and then factors stand for."""
    codes, factors = np.split(np.asarray(packed), [packing.part], axis=1)
    codes = codes.view(np.int8 if packing.format == "int8" else E4M3)
    factors = np.ascontiguousarray(factors).view("<f4").reshape(-1, 1)
    return codes.astype(np.float64).reshape(-1, packing.block) * factors, factors


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_vectors_are_rounded_in_blocks_unpacked_and_summed(packing):
    # Blocks differ by orders of magnitude, and one is zeros.
    block = np.arange(packing.size) // packing.block
    sizes = 10.0 ** -(block % 11) * (block != 2)
    x, y = (sizes * np.asarray(support.normal(packing.size, seed=i)) for i in (0, 1))
    rows = [pack(jnp.asarray(v, jnp.float32), packing) for v in (x, y)]
    assert rows[0].shape == (packing.parts, packing.row_bytes)
    (of_x, factors), (of_y, _) = (decoded(row, packing) for row in rows)
    exact, half = blocks_of(np.float32(x), packing), HALF_STEPS[packing.format]
    amax = np.abs(exact).max(1, keepdims=True)
    limit = 127 if packing.format == "int8" else 448
    np.testing.assert_allclose(factors, np.maximum(amax / limit, 2.0**-125), 2**-22)
    assert np.all(np.abs(of_x - exact) <= 1.001 * half * amax)
    vectors = [v.ravel()[: packing.size] for v in (of_x, of_y)]
    found = unpack(rows[0], packing, jnp.float32)
    np.testing.assert_allclose(found, vectors[0], rtol=2**-23)
    narrow = unpack(rows[0], packing, jnp.bfloat16)
    np.testing.assert_array_equal(narrow, found.astype(jnp.bfloat16))
    total = unpack(jnp.concatenate(rows), packing, jnp.float32)
    bound = 2.0**-22 * np.sum(np.abs(vectors), axis=0)
    assert np.all(np.abs(np.asarray(total) - np.sum(vectors, axis=0)) <= bound)
    # Of the parts of one vector, packed again.
    parts, summed = of_x.reshape(packing.parts, -1), sum_packed(rows[0], packing)
    one = Packing(packing.part, 1, packing.block, packing.format)
    expected = blocks_of(parts.sum(0), one)
    amax = np.abs(expected).max(1, keepdims=True)
    assert np.all(np.abs(decoded(summed, one)[0] - expected) <= 1.001 * half * amax)


def test_a_fault_makes_its_block_nan_and_no_other():
    for packing, fault in ((PACKINGS[0], np.nan), (PACKINGS[1], -np.inf)):
        x = support.normal(packing.size).at[200].set(fault)
        found = unpack(pack(x, packing), packing, jnp.float32)
        block = np.arange(packing.size) // packing.block
        np.testing.assert_array_equal(np.isnan(found), block == 200 // packing.block)
