"""Packing in 8 bits by Triton against XLA's, interpreted, lowered and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax import xla
from loka_jax.ops.collectives import quantized_psum
from loka_jax.packed import Packing
from loka_jax.triton import packed
from tests import support
from tests.support.triton import (
    compiled,
    interpreted,
    num_kernels,
    on_gpu,
    spilled_bytes,
)

__all__ = ["interpreted", "on_gpu"]

# Tiles that are full and not, of one program and of several; parts that are padding.
CASES = [
    (Packing(1, 2, 32), jnp.float32),
    (Packing(3000, 2, 128), jnp.float32),
    (Packing(2 * 8192, 2, 128, "e4m3"), jnp.float32),
    (Packing(5000, 3, 64), jnp.bfloat16),
    (Packing(9001, 4, 256, "e4m3"), jnp.bfloat16),
    (Packing(5000, 10, 32), jnp.float32),
]
cases = pytest.mark.parametrize("packing, dtype", CASES, ids=str)


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def anywhere(request):
    """Runs a test interpreted and on a GPU."""
    request.getfixturevalue(request.param)


anywhere_ = pytest.mark.usefixtures("anywhere")


def values(packing, dtype=jnp.float32, seed=0):
    """Returns values whose blocks differ by orders of magnitude, some of them zero."""
    x = np.array(support.normal(packing.size, seed=seed))
    block = np.arange(packing.size) // packing.block
    return jnp.asarray(x * 10.0 ** (-(block % 30)) * (block % 7 != 6), dtype)


def _assert_same(ours, theirs, packing):
    """Asserts equal bytes, but for codes that float32 rounds the other way."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == jnp.uint8
    codes, scales = (
        [np.split(np.asarray(x), [packing.part], axis=1)[i] for x in (ours, theirs)]
        for i in (0, 1)
    )
    scales = [np.ascontiguousarray(x).view(np.float32) for x in scales]
    np.testing.assert_allclose(*scales, rtol=2**-22)
    unlike = codes[0] != codes[1]
    assert np.mean(unlike) < 1e-3
    steps = codes[0].astype(np.int8).astype(int) - codes[1].astype(np.int8).astype(int)
    assert np.all(np.abs(steps) <= 1)


@anywhere_
@cases
def test_vectors_are_packed_as_by_xla(packing, dtype):
    x = values(packing, dtype)
    _assert_same(packed.pack(x, packing), xla.pack(x, packing), packing)


@anywhere_
@cases
def test_parts_are_added_up_as_by_xla(packing, dtype):
    parts = xla.pack(values(packing, dtype), packing)
    ours, theirs = packed.sum_packed(parts, packing), xla.sum_packed(parts, packing)
    _assert_same(ours, theirs, packing)


@anywhere_
@cases
def test_parts_are_unpacked_as_by_xla(packing, dtype):
    parts = xla.pack(values(packing), packing)
    ours = packed.unpack(parts, packing, dtype)
    assert ours.dtype == dtype and ours.shape == (packing.size,)
    np.testing.assert_array_equal(ours, xla.unpack(parts, packing, dtype))


@anywhere_
@cases
def test_vectors_are_added_up_as_they_are_unpacked(packing, dtype):
    vectors = [xla.pack(values(packing, seed=i), packing) for i in range(2)]
    rows = jnp.concatenate(vectors)
    ours = np.asarray(packed.unpack(rows, packing, dtype), np.float64)
    theirs = np.asarray(xla.unpack(rows, packing, dtype), np.float64)
    # A compiler may leave out the rounding of a product before it is added.
    each = [np.abs(xla.unpack(x, packing)) for x in vectors]
    magnitude = np.asarray(each[0] + each[1], np.float64)
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 0.0
    bound = 2.0**-23 * magnitude + rounding * np.abs(theirs)
    assert np.all(np.abs(ours - theirs) <= bound)
    assert np.any(theirs != np.asarray(xla.unpack(vectors[0], packing, dtype)))


@anywhere_
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", ["int8", "e4m3"])
def test_a_fault_is_seen_in_its_block_alone(fault, format):
    packing = Packing(1000, 2, 64, format)
    x = values(packing).at[200].set(fault)
    parts = packed.pack(x, packing)
    total = packed.sum_packed(parts, packing)
    one = Packing(packing.part, 1, 64, format)
    for packed_x, p in ((parts, packing), (total, one)):
        faulty = np.isnan(np.asarray(packed.unpack(packed_x, p)))
        np.testing.assert_array_equal(faulty, np.arange(p.size) // 64 == 200 // 64)


def test_other_dtypes_and_too_many_blocks_are_refused():
    packing = Packing(1000, 2)
    assert packed.why_not(packing, jnp.float32) is None
    assert packed.why_not(packing, jnp.bfloat16) is None
    reason = "float16 is neither float32 nor bfloat16"
    assert packed.why_not(packing, jnp.float16) == reason
    reason = packed.why_not(Packing(2**36, 2, 32), jnp.float32)
    assert reason == "2147483648 blocks are more than 2147483647"
    with pytest.raises(ValueError, match="pack: float16 is neither"):
        packed.pack(jnp.ones(1000, jnp.float16), packing)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "e4m3"])
@pytest.mark.parametrize("size, parts, block", [(2**24, 2, 128), (10_016, 10, 32)])
def test_kernels_compile_without_spills_and_move_whole_words(
    size, parts, block, format
):
    packing = Packing(size, parts, block, format)
    x = jax.ShapeDtypeStruct((size,), jnp.float32)
    rows = jax.ShapeDtypeStruct((parts, packing.row_bytes), jnp.uint8)
    for run, operand in ((packed.pack, x), (packed.sum_packed, rows)):
        program = compiled(functools.partial(run, packing=packing), operand)
        assert spilled_bytes(program.ptxas_report()) == 0
        # Codes are stored in words of four at least.
        assert "st.global.b8" not in program.ptx
    twice = jax.ShapeDtypeStruct((2 * parts, packing.row_bytes), jnp.uint8)
    for operand in (rows, twice):
        program = compiled(functools.partial(packed.unpack, packing=packing), operand)
        assert spilled_bytes(program.ptxas_report()) == 0
        assert "ld.global.b8" not in program.ptx


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("devices, kernels", [(2, 2), (8, 3)])
def test_a_sum_over_devices_takes_few_kernels(devices, kernels, check_vma):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    auto = (jax.sharding.AxisType.Auto,)
    total = jax.shard_map(
        lambda x: quantized_psum(x[0], "d", implementation="triton"),
        mesh=jax.make_mesh(
            (devices,), ("d",), axis_types=auto, devices=jax.devices()[:devices]
        ),
        in_specs=P("d"),
        out_specs=P(),
        check_vma=check_vma,
    )
    operand = jax.ShapeDtypeStruct((devices, 5000), jnp.float32)
    assert num_kernels(total, operand) == kernels
