"""Launches over rows, lists and vectors, recorded: sizes, tiles, and what is served."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.normed import NormVectors
from loka_jax.packed import Packing
from loka_jax.triton import (
    dot_features,
    gated_norm,
    joined_norm,
    merge,
    packed,
    route,
    row_update,
    row_wire,
)
from tests.support.triton import launches

__all__ = ["launches"]

BF16, F32, I32, U32 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint32


def ones(*shape, dtype=F32):
    # By numpy: jax.numpy would compile a program for every shape.
    return jax.device_put(np.ones(shape, dtype))


HALF, PACKING = jnp.float16, Packing(1000, 2)
NARROW = ones(1, 1, 256, dtype=BF16)


@pytest.mark.parametrize(
    "module, operands, reason",
    [
        (dot_features, (4, 65, 16, BF16), "n=65 is more than 64"),
        (dot_features, (4, 1, 16, BF16), "n=1: there are no pairs"),
        (dot_features, (4, 27, 16, F32), "float32 is not bfloat16"),
        (merge, (16, 2**30), None),
        (merge, (17, 170), "17 lists are more than 16"),
        (packed, (PACKING, HALF), "float16 is neither float32"),
        (route, (2**30, 16), None),
        (route, (2**30 + 1, 2), "or more than 1073741824"),
        (route, (10, 17), "17 owners are more than 16"),
        (row_update, (2**30, 512, BF16), None),
        (row_update, (2**30 + 1, 16, F32), "N=1073741825 is more than"),
        (row_update, (8, 513, F32), "D=513 is more than 512"),
        (row_wire, ("int8", 2**31 - 2, 1024, BF16), None),
        (row_wire, ("f32", 8, 16, F32), "float32 is not cast"),
        (row_wire, ("int8", 8, 1025, F32), "D is more than 1024"),
        (gated_norm, (ones(1, 4096),), "float32 is not bfloat16"),
        (gated_norm, (ones(1, 4097, dtype=BF16),), "n=4097 is not 1 to 4096"),
        (joined_norm, (NARROW, ones(1, 1, 256)), "is not bfloat16"),
        (joined_norm, (ones(1, 1, 257, dtype=BF16),), "d=257 is not 1 to 256"),
    ],
)
def test_what_is_not_served_has_a_reason(module, operands, reason):
    found = module.why_not(*operands)
    assert found is None if reason is None else reason in found


def test_operations_refuse_what_is_not_served():
    ids, grads = jnp.asarray(np.zeros(4, np.int32)), ones(4, 600)
    refused = functools.partial(pytest.raises, ValueError)
    with refused(match="sgd: D=600 is more than 512"):
        row_update.sgd(grads, ids, ids, grads, lr=0.1)
    with refused(match="encode: float16 is neither"):
        row_wire.encode(ones(2, 4, dtype=HALF), ids[None], codec="int8")
    with refused(match="merge_lists: 17 lists are more than 16"):
        merge.merge_lists(jnp.zeros((17, 10), I32))
    with refused(match="pack: float16 is neither"):
        packed.pack(ones(1000, dtype=HALF), ones(2, dtype=U32), PACKING)


def test_levels_shrink_to_a_single_program_and_have_larger_tiles():
    Level = row_update.Level
    million = [Level(10**6, 64, 4), Level(31_250, 512, 16), Level(124, 128, 8)]
    assert row_update.levels(10**6, 16) == million
    assert row_update.levels(100, 512) == [Level(100, 32, 16), Level(8, 32, 16)]
    assert row_update.levels(5, 1) == [Level(5, 32, 1)]
    for n, dim in itertools.product((1, 33, 2**30), (1, 512)):
        levels = row_update.levels(n, dim)
        assert levels[0].n == n and levels[-1].blocks == 1
        for level, above in itertools.pairwise(levels):
            assert above.n == 2 * level.blocks < level.n


def test_results_are_written_in_place_at_every_level(launches):
    table, state, words = ones(500, 20, dtype=BF16), ones(500), ones(3, dtype=U32)
    ids, order, grads = ones(90, dtype=I32), ones(90, dtype=I32), ones(90, 20)
    operands, noise = (ids, order, grads), row_update.Noise(words, depth=4, shards=8)
    row_update.rowwise_adagrad(table, state, *operands, lr=0.25, noise=noise, eps=0.5)
    row_update.sgd(table, *operands, lr=0.25)
    row_update.sum_runs(*operands)
    for first, second in itertools.batched(launches, 2):
        first.assert_given(ids=ids, grads=grads, is_carried=False, n=90)
        first.assert_given(carried_ids=(6,), carried=(6, 20))
        second.assert_given(is_carried=True, n=6)
        assert (first.grid, second.grid) == (3, 1)
    of_table, of_state = {"old_table": "table"}, {"old_state": "state"}
    of_sums = {}, {"sums_so_far": "sums"}
    expected = [of_table | of_state] * 2 + [of_table] * 2 + [*of_sums]
    assert [launch.aliases for launch in launches] == expected
    launches[0].assert_given(words=words, depth=4, shards=8, eps=0.5)
    assert launches[0].given["lr"].tolist() == [0.25]


@pytest.mark.parametrize(
    "codec, dtype, width", [("bf16", jnp.uint16, 10800), ("int8", jnp.uint8, 5670)]
)
def test_rows_for_the_wire_are_followed_by_their_scales(launches, codec, dtype, width):
    rows, ids, slots = ones(50, 20), ones(3, 270, dtype=I32), ones(100, dtype=I32)
    payload = row_wire.encode(rows, ids, codec=codec)
    out = row_wire.decode(payload, slots, codec, 20)
    assert payload.dtype == dtype and payload.nbytes == 3 * width
    assert out.shape == (100, 20) and out.dtype == BF16
    for launch in launches:
        of = launch.given["of"]
        assert (of.capacity, of.dim, of.tile, of.tile_dim) == (270, 20, 64, 32)
    assert [launch.grid for launch in launches] == [3 * 5, 2]


def test_merged_lists_are_searched_to_the_last_entry(launches):
    merge.merge_lists(ones(3, 100, dtype=I32))
    merge.merge_lists(ones(2, 64, dtype=I32))
    for launch in launches:
        assert launch.given["of"].halvings == 7  # of 65 places in a list of 64, too


def test_a_joined_norm_keeps_and_writes_only_what_is_read(launches):
    x, dy = ones(11, 8, 20, dtype=BF16), ones(11, 8, 20, dtype=BF16)
    parts = ones(11, 3, 20, dtype=BF16), ones(11, 5, 20, dtype=BF16)
    vectors = NormVectors(gamma=ones(20), beta=ones(20))
    options = dict(norm="layer", epsilon=1e-3)
    _, *absent = joined_norm.joined_norm(parts, x, vectors, **options, is_kept=False)
    y, xhat, rstd = joined_norm.joined_norm(parts, x, **options)
    assert absent == [None, None] and xhat is y
    for with_dx in (True, False):
        options = dict(counts=(3, 5), norm="layer", with_dx=with_dx)
        dparts, dx, sums = joined_norm.joined_norm_backward(
            dy, xhat, rstd, vectors, **options
        )
        assert [d.shape for d in dparts] == [d.shape for d in parts]
        assert dx.shape == x.shape if with_dx else dx is None
        assert sums.gamma.shape == sums.beta.shape == (20,)
    assert [launch.grid for launch in launches] == [11, 11, 3, 3]


def test_programs_of_gated_norms_share_sums(launches):
    rows, dy = ones(5000, 500, dtype=BF16), ones(5000, 1500, dtype=BF16)
    vectors, operands = NormVectors(gamma=ones(500)), (rows, rows)
    y = gated_norm.gated_norm(*operands, vectors, epsilon=1e-6)
    du, dx, sums = gated_norm.gated_norm_backward(dy, *operands, vectors, epsilon=1e-6)
    assert y.shape == dy.shape and du.shape == dx.shape == rows.shape
    assert sums.gamma.shape == (500,) and sums.beta is None
    tiles, programs = (launch.grid for launch in launches)
    assert tiles == 5000 * 512 // gated_norm.FORWARD.elements
    assert programs == gated_norm.BACKWARD.programs
