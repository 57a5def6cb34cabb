"""Rows, lists and vectors by Triton against XLA's, interpreted and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import xla
from loka_jax.ops import exchange, interaction, row_codec
from loka_jax.ops.embedding import BAD_ID
from loka_jax.packed import Packing
from loka_jax.triton import dot_features, merge, packed, route, row_wire
from tests import support
from tests.support.triton import anywhere, interpreted, on_gpu, skip_without_triton

__all__ = ["anywhere", "interpreted", "on_gpu"]

skip_without_triton()

anywhere_ = pytest.mark.usefixtures("anywhere")
BF16, F32 = jnp.bfloat16, jnp.float32
RANDOM = jnp.uint32([0x9ABCDEF0, 0x12345678])  # words that decide roundings


# Pairs of vectors.


def width_of(fields, dim, has_bottom, multiple, pairs):
    """Returns the columns of the result."""
    count = dot_features.count(fields + has_bottom, pairs)
    return interaction.padded(dim * has_bottom + count, multiple)


def check_dot_features(batch, fields, dim, has_bottom, multiple=None, pairs="i > j"):
    """Checks features and gradients against those of XLA."""
    z = support.normal(batch, fields, dim, seed=1, dtype=BF16)
    args = support.normal(batch, dim, dtype=BF16) if has_bottom else None, z
    width = width_of(fields, dim, has_bottom, multiple, pairs)
    options = dict(multiple=multiple, implementation="xla", pairs=pairs)
    by_xla = functools.partial(interaction.dot_features, **options)
    out, vjp = jax.vjp(by_xla, *args)
    g = support.normal(batch, width, seed=2, dtype=BF16)
    ours = dot_features.dot_features(*args, width=width, pairs=pairs)
    ours = ours, *dot_features.dot_features_backward(*args, g, pairs=pairs)
    for x, y in zip(ours, (out, *vjp(g)), strict=True):
        assert (x is None) == (y is None)
        if x is None:
            continue
        assert x.shape == y.shape and x.dtype == y.dtype == BF16
        x, y = (np.asarray(v, np.float32) for v in (x, y))
        error, size = np.abs(x - y), np.abs(y).max()
        # A step of bfloat16; where values cancel, of the largest sum in float32.
        assert np.all(error <= 2**-7 * np.abs(y) + 1e-5 * size)
        assert np.mean(error == 0) > 0.97


@anywhere_
@pytest.mark.parametrize(
    "sizes, has_bottom, multiple, pairs",
    [
        ((9, 2, 16), False, None, "i > j"),
        ((17, 26, 16), True, None, "i > j"),
        ((3, 7, 5), True, 1, "i > j"),
        ((2, 40, 24), False, 128, "i > j"),
        ((2, 3, 128), True, 128, "i > j"),
        ((3, 7, 5), True, 1, "i >= j"),
        ((9, 17, 16), False, 1, "i < j"),
        ((3, 27, 16), False, 1, "i <= j"),
    ],
)
def test_features_and_gradients_are_those_of_xla(sizes, has_bottom, multiple, pairs):
    check_dot_features(*sizes, has_bottom, multiple, pairs)


# Rows cast for the wire.


def table(dim, num_rows=50, dtype=F32):
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


# Lists and their capacity, D: full tiles and others, dims that are no power of 2.
@anywhere_
@pytest.mark.parametrize("words", [None, RANDOM], ids=["nearest", "unbiased"])
@pytest.mark.parametrize(
    "lists, capacity, dim, codec, dtype",
    [
        (1, 8, 1, "bf16", F32),
        (1, 8, 1, "int8", BF16),
        (2, 200, 16, "bf16", BF16),
        (3, 24, 12, "int8", F32),
        (3, 24, 12, "e4m3", BF16),
        (2, 40, 128, "e4m3", F32),
    ],
)
def test_rows_are_packed_and_spread_as_by_xla(
    lists, capacity, dim, codec, dtype, words
):
    rows, ids = table(dim, dtype=dtype), numbers((lists, capacity), 50)
    ours = row_wire.encode(rows, ids, words, codec=codec)
    theirs = row_codec.gather(rows, ids, codec, words, implementation="xla")
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    unpack = functools.partial(row_codec.decode, codec=codec, dim=dim)
    found, want = (np.asarray(unpack(x), np.float32) for x in (ours, theirs))
    is_fine = np.isfinite(want).all(-1)
    assert not np.isfinite(found[~is_fine]).all(-1).any()
    np.testing.assert_array_equal(found[is_fine], want[is_fine])
    slots = numbers((1000,), lists * capacity)
    ours = row_wire.decode(theirs, slots, codec, dim)
    theirs = row_codec.scatter(theirs, slots, codec, dim, implementation="xla")
    assert ours.dtype == theirs.dtype == BF16
    np.testing.assert_array_equal(ours.astype(F32), theirs.astype(F32))


# Lists.

PART = 300  # rows of an owner


def places_of(case, owners, n):
    """Returns sorted places, and the former positions of the ids."""
    draw, number = np.random.default_rng(0), owners * PART
    places = draw.integers(0, number, n)
    places = {
        "any": places,
        "one row": np.full(n, number // 2),
        "one owner": places % PART + number - PART,
        "ignored": np.full(n, number),
        "some ignored": np.where(np.arange(n) % 3, places, number),
        "all distinct": draw.permutation(number)[:n],
    }[case]
    order = np.argsort(places, kind="stable")
    return jnp.asarray(places[order], jnp.uint32), jnp.asarray(order, jnp.int32)


@anywhere_
@pytest.mark.parametrize(
    "case, owners, capacity",
    [
        ("any", 8, 24),
        ("one row", 3, 500),
        ("one owner", 3, 24),
        ("ignored", 3, 24),
        ("some ignored", 8, 500),
        ("all distinct", 1, 24),
    ],
)
def test_lists_of_distinct_places_are_those_of_xla(case, owners, capacity):
    places, positions = places_of(case, owners, min(500, owners * PART))
    how = dict(owners=owners, part=PART, capacity=capacity)
    # Several tiles a program, several programs, the last of either not full.
    config = route.TuningConfig(tile=32, blocks=4)
    ours = route.lists(places, positions, **how, config=config)
    theirs = exchange.lists_by_xla(places, positions, **how)
    for name, found, want in zip(ours._fields, ours, theirs, strict=True):
        np.testing.assert_array_equal(found, want, err_msg=name)
    distinct = np.unique(np.asarray(places)) // PART
    assert int(ours.need) == max(np.sum(distinct == owner) for owner in range(owners))


# Of these entries in a list those at the end may be unused.
@anywhere_
@pytest.mark.parametrize(
    "case, count, capacity",
    [
        ("any", 1, 40),
        ("any", 3, 50),
        ("one number", 2, 64),
        ("unused", 3, 50),
        ("one after the other", 2, 1),
        ("partly used", 8, 7),
    ],
)
def test_merged_entries_are_those_of_a_stable_sort(case, count, capacity):
    draw = np.random.default_rng(0)
    any_list = draw.integers(0, 3 * capacity, (count, capacity))
    used = draw.integers(0, capacity + 1, (count, 1))
    lists = {
        "any": any_list,
        "one number": np.full((count, capacity), 7),
        "unused": np.full((count, capacity), BAD_ID),
        "one after the other": any_list + 3 * capacity * np.arange(count)[::-1, None],
        "partly used": np.where(np.arange(capacity) < used, any_list, BAD_ID),
    }[case]
    lists = np.sort(lists, axis=1).astype(np.int32)
    config = merge.TuningConfig(tile=32)
    entries, order = merge.merge_lists(jnp.asarray(lists), config=config)
    want = np.argsort(lists.ravel(), kind="stable")
    np.testing.assert_array_equal(order, want)
    np.testing.assert_array_equal(entries, lists.ravel()[want])


# Vectors in 8 bits.


def values(packing, dtype=F32, seed=0):
    """Returns values whose blocks differ by orders of magnitude, some of them zero."""
    x = np.array(support.normal(packing.size, seed=seed))
    block = np.arange(packing.size) // packing.block
    return jnp.asarray(x * 10.0 ** (-(block % 30)) * (block % 7 != 6), dtype)


def assert_same_bytes(ours, theirs, packing):
    """Asserts equal bytes, but for codes that float32 rounds the other way."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == jnp.uint8
    parts = (np.split(np.asarray(x), [packing.part], axis=1) for x in (ours, theirs))
    codes, scales = zip(*parts, strict=True)
    scales = [np.ascontiguousarray(x).view(np.float32) for x in scales]
    np.testing.assert_allclose(*scales, rtol=2**-22)
    steps = np.abs(np.subtract(*(x.astype(np.int8).astype(int) for x in codes)))
    assert np.mean(steps > 0) < 1e-3 and np.all(steps <= 1)


# Tiles that are full and not, of one program and of several; parts that are padding.
@anywhere_
@pytest.mark.parametrize(
    "packing, dtype",
    [
        (Packing(1, 2, 32), F32),
        (Packing(2 * 8192, 2, 128, "e4m3"), F32),
        (Packing(5000, 3, 64), BF16),
        (Packing(9001, 4, 256, "e4m3"), BF16),
        (Packing(5000, 10, 32), F32),
    ],
)
def test_vectors_are_packed_added_up_and_unpacked_as_by_xla(packing, dtype):
    x, other = values(packing, dtype), values(packing, dtype, seed=1)
    parts, others = (xla.pack(v, RANDOM, packing) for v in (x, other))
    assert_same_bytes(packed.pack(x, RANDOM, packing), parts, packing)
    ours = packed.sum_packed(parts, RANDOM, packing)
    theirs = xla.sum_packed(parts, RANDOM, packing)
    assert_same_bytes(ours, theirs, packing)
    ours = packed.unpack(parts, packing, dtype)
    assert ours.dtype == dtype and ours.shape == (packing.size,)
    np.testing.assert_array_equal(ours, xla.unpack(parts, packing, dtype))
    # Several vectors are added up.
    rows = jnp.concatenate([parts, others])
    ours = np.asarray(packed.unpack(rows, packing, dtype), np.float64)
    theirs = np.asarray(xla.unpack(rows, packing, dtype), np.float64)
    # A compiler may leave out the rounding of a product before it is added.
    magnitude = sum(np.abs(xla.unpack(x, packing)) for x in (parts, others))
    rounding = 2.0**-7 if dtype == BF16 else 0.0  # one unit in the last place
    bound = 2.0**-23 * np.asarray(magnitude, np.float64) + rounding * np.abs(theirs)
    assert np.all(np.abs(ours - theirs) <= bound)


@anywhere_
@pytest.mark.parametrize("fault, format", [(np.nan, "int8"), (-np.inf, "e4m3")])
def test_a_fault_is_seen_in_its_block_alone(fault, format):
    packing = Packing(1000, 2, 64, format)
    parts = packed.pack(values(packing).at[200].set(fault), RANDOM, packing)
    total = packed.sum_packed(parts, RANDOM, packing)
    one = Packing(packing.part, 1, 64, format)
    for packed_x, p in ((parts, packing), (total, one)):
        faulty = np.isnan(np.asarray(packed.unpack(packed_x, p)))
        np.testing.assert_array_equal(faulty, np.arange(p.size) // 64 == 200 // 64)
