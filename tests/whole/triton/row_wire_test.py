"""Rows cast for the wire by Triton's kernels: the bits of XLA's twin."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops import exchange, row_codec
from loka_jax.ops.embedding import BAD_ID
from loka_jax.ops.exchange import Routed
from loka_jax.triton import row_wire
from tests import support
from tests.support.triton import (
    compiled,
    interpreted,
    num_kernels,
    on_gpu,
    spilled_bytes,
)

__all__ = ["interpreted", "on_gpu"]

CODECS = ["bf16", "e4m3", "int8"]
# Lists and their capacity, D; tiles that are full and not, dims that are no power of 2.
CASES = [(1, 1, 1), (2, 200, 16), (3, 24, 12), (2, 40, 128)]
codecs = pytest.mark.parametrize("codec", CODECS)
cases = pytest.mark.parametrize("lists, capacity, dim", CASES)


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def anywhere(request):
    """Runs a test interpreted and on a GPU."""
    request.getfixturevalue(request.param)


anywhere_ = pytest.mark.usefixtures("anywhere")


def table(dim, num_rows=50, dtype=jnp.float32):
    """Returns rows that differ by orders of magnitude; zeros, NaN and infinity."""
    rows = np.array(support.uneven_rows(num_rows, dim, decades=6))
    rows[3] = 0
    rows[4] = rows[5] = 1
    rows[4, -1], rows[5, 0] = np.nan, -np.inf
    return jnp.asarray(rows, dtype)


def numbers(shape, below):
    """Returns numbers below a limit, some of them `BAD_ID`, negative or too large."""
    draw = np.random.default_rng(0)
    found = draw.integers(0, below, shape)
    bad = draw.choice([BAD_ID, -1, below], shape)
    return jnp.asarray(np.where(draw.random(shape) < 0.2, bad, found), jnp.int32)


def payload_of(lists, capacity, dim, codec):
    rows = table(dim, num_rows=lists * capacity)[: lists * capacity]
    return row_codec.encode(rows.reshape(lists, capacity, dim), codec)


@anywhere_
@codecs
@cases
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_are_gathered_and_packed_as_by_xla(lists, capacity, dim, codec, dtype):
    rows, ids = table(dim, dtype=dtype), numbers((lists, capacity), 50)
    ours = row_wire.encode(rows, ids, codec)
    theirs = row_codec.gathered(rows, ids, codec, implementation="xla")
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    unpack = functools.partial(row_codec.decode, codec=codec, dim=dim)
    found, want = (np.asarray(unpack(x), np.float32) for x in (ours, theirs))
    is_fine = np.isfinite(want).all(-1)
    assert not np.isfinite(found[~is_fine]).all(-1).any()
    np.testing.assert_array_equal(found[is_fine], want[is_fine])


@anywhere_
@codecs
@cases
def test_places_are_unpacked_and_spread_as_by_xla(lists, capacity, dim, codec):
    payload = payload_of(max(lists, 2), max(capacity, 8), dim, codec)
    slots = numbers((1000,), max(lists, 2) * max(capacity, 8))
    ours = row_wire.decode(payload, slots, codec, dim)
    theirs = row_codec.spread(payload, slots, codec, dim, implementation="xla")
    assert ours.dtype == theirs.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    )


def test_operands_that_are_not_served_are_refused():
    assert row_wire.why_not("int8", 8, 16, jnp.float32) is None
    for operands, reason in (
        (("f32", 8, 16, jnp.float32), "float32 is not cast"),
        (("int8", 0, 16, jnp.float32), "0 rows of D=16 are none"),
        (("int8", 8, 2048, jnp.float32), "more than 1024"),
        (("int8", 2**31, 16, jnp.float32), "2147483648 rows are more than"),
        (("int8", 8, 16, jnp.float16), "float16 is neither float32 nor bfloat16"),
    ):
        assert reason in (row_wire.why_not(*operands) or "")
    with pytest.raises(ValueError, match="encode: float16 is neither"):
        row_wire.encode(jnp.ones((2, 4), jnp.float16), jnp.zeros((1, 2), int), "int8")
    with pytest.raises(ValueError, match="cannot run: float32 is not cast"):
        row_codec.gathered(
            jnp.ones((2, 4)), jnp.zeros((1, 2), int), "f32", implementation="triton"
        )


@pytest.mark.slow
@codecs
def test_a_fetch_over_devices_takes_two_kernels(codec):
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    auto = (jax.sharding.AxisType.Auto,)

    def fetch(rows, asked, slots):
        routed = Routed(asked, slots, slots, slots, asked)
        return exchange.fetch(rows, routed, codec, "d", implementation="triton")

    over = jax.shard_map(
        fetch,
        mesh=jax.make_mesh((8,), ("d",), axis_types=auto),
        in_specs=P("d"),
        out_specs=P("d"),
        check_vma=False,
    )
    shapes = (
        jax.ShapeDtypeStruct((80, 16), jnp.float32),
        jax.ShapeDtypeStruct((64, 24), jnp.int32),
        jax.ShapeDtypeStruct((400,), jnp.int32),
    )
    assert num_kernels(over, *shapes) == 2


@pytest.mark.slow
@codecs
@pytest.mark.parametrize("dim", [16, 128])
def test_kernels_compile_without_spills_and_move_whole_words(codec, dim):
    rows = jax.ShapeDtypeStruct((10_000, dim), jnp.float32)
    ids = jax.ShapeDtypeStruct((4, 1024), jnp.int32)
    encode = functools.partial(row_wire.encode, codec=codec)
    payload = jax.eval_shape(
        functools.partial(row_codec.gathered, codec=codec, implementation="xla"),
        *(rows, ids),
    )
    decode = functools.partial(row_wire.decode, codec=codec, dim=dim)
    slots = jax.ShapeDtypeStruct((4096,), jnp.int32)
    for run, operands in ((encode, (rows, ids)), (decode, (payload, slots))):
        program = compiled(run, *operands)
        assert spilled_bytes(program.ptxas_report()) == 0
        assert "st.global.v" in program.ptx and "ld.global.v" in program.ptx
