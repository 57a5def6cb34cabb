"""Launches over rows, lists and vectors, recorded: sizes, tiles, and what is served."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.packed import Packing
from loka_jax.triton import (
    dot_features,
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
    return jnp.asarray(np.ones(shape, dtype))


HALF, PACKING = jnp.float16, Packing(1000, 2)


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
        (
            joined_norm,
            (ones(1, 1, 256, dtype=BF16), ones(1, 1, 256)),
            "is not bfloat16",
        ),
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
        row_wire.encode(ones(2, 4, dtype=HALF), ids[None], "int8")
    with refused(match="merged: 17 lists are more than 16"):
        merge.merged(jnp.zeros((17, 10), I32))
    with refused(match="pack: float16 is neither"):
        packed.pack(ones(1000, dtype=HALF), PACKING)


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


@pytest.mark.parametrize(
    "kind, is_noisy",
    [("sums", False), ("adagrad", False), ("sgd", True), ("adagrad", True)],
)
def test_results_are_written_in_place_at_every_level(launches, kind, is_noisy):
    table, state, words = ones(500, 20, dtype=BF16), ones(500), ones(3, dtype=U32)
    ids, order, grads = ones(90, dtype=I32), ones(90, dtype=I32), ones(90, 20)
    noise = row_update.Noise(words, depth=4, shards=8) if is_noisy else None
    rest, is_adagrad = dict(lr=0.25, noise=noise), kind == "adagrad"
    match kind:
        case "sums":
            new = row_update.sum_runs(ids, order, grads)
        case "sgd":
            new = row_update.sgd(table, ids, order, grads, **rest)
        case "adagrad":
            operands, rest["eps"] = (table, state, ids, order, grads), 0.5
            new, new_state = row_update.rowwise_adagrad(*operands, **rest)
            assert new_state.shape == (500,)
    first, second = launches
    first.assert_given(ids=ids, grads=grads, is_carried=False, n=90)
    first.assert_given(carried_ids=(6,), carried=(6, 20))
    second.assert_given(is_carried=True, n=6)
    inputs = (second.given[name].shape for name in ("ids", "grads"))
    assert tuple(inputs) == ((6,), (6, 20)) and (first.grid, second.grid) == (3, 1)
    for launch in launches:
        launch.assert_given(dim=20, positions=32, tile_dim=32)
    if kind == "sums":
        assert new.shape == (90, 20) and new.dtype == F32
        first.assert_given(places=order, sums=(90, 20), carried_places=(6,))
        second.assert_given(sums=(90, 20))
        assert (first.aliases, second.aliases) == ({}, {"sums_so_far": "sums"})
        return
    assert new.shape == (500, 20) and new.dtype == BF16
    first.assert_given(old_table=table, **(dict(old_state=state) if is_adagrad else {}))
    aliases = {"old_table": "table"} | ({"old_state": "state"} if is_adagrad else {})
    for launch in launches:
        assert launch.aliases == aliases and launch.given["lr"].tolist() == [0.25]
        launch.assert_given(order=order, table=(500, 20), is_adagrad=is_adagrad)
        launch.assert_given(eps=0.5 if is_adagrad else 0.0)
        launch.assert_given(depth=4 if is_noisy else 1, shards=8 if is_noisy else 0)
        launch.assert_given(**(dict(words=words) if is_noisy else {}))


@pytest.mark.parametrize(
    "codec, dtype, width", [("bf16", BF16, 5400), ("int8", jnp.uint8, 5670)]
)
def test_rows_for_the_wire_are_followed_by_their_scales(launches, codec, dtype, width):
    rows, ids, slots = ones(50, 20), ones(3, 270, dtype=I32), ones(100, dtype=I32)
    payload = row_wire.encode(rows, ids, codec)
    out = row_wire.decode(payload, slots, codec, 20)
    row_wire.encode(ones(50, 1000), ids, codec)
    encode, decode, of_wide_rows = launches
    for launch in (encode, decode):
        launch.assert_given(capacity=270, dim=20, width=width, tile=64, tile_dim=32)
        assert launch.given["payload"].dtype == dtype and launch.given["codec"] == codec
    encode.assert_given(rows=rows, ids=ids, num_rows=50, payload=(3, width))
    decode.assert_given(slots=slots, n=100, num_slots=810, rows=(100, 20))
    of_wide_rows.assert_given(tile=2)
    assert [launch.grid for launch in launches] == [3 * 5, 2, 3 * 135]
    assert payload.dtype == (jnp.uint16 if codec == "bf16" else jnp.uint8)
    assert out.shape == (100, 20) and out.dtype == BF16


def test_merged_lists_are_searched_to_the_last_entry(launches):
    lists = ones(3, 100, dtype=I32)
    entries, order = merge.merged(lists)
    merge.merged(ones(2, 64, dtype=I32))
    first, second = launches
    first.assert_given(lists=lists, count=3, capacity=100, tile=256, halvings=7)
    assert first.grid == 2 and entries.shape == order.shape == (300,)
    second.assert_given(halvings=7)  # of 65 places in a list of 64


@pytest.mark.parametrize("format, limit", [("int8", 127.0), ("e4m3", 448.0)])
def test_vectors_are_packed_by_tiles_of_whole_blocks(launches, format, limit):
    packing = Packing(10_000, 3, 64, format)  # of 56 blocks a part
    x, width = ones(10_000), 56 * 68
    rows = packed.pack(x, packing)
    total = packed.sum_packed(rows, packing)
    out = packed.unpack(ones(6, width, dtype=jnp.uint8), packing, BF16)
    pack, add, unpack = launches
    for launch, tile, grid in zip(launches, (32, 64, 16), (6, 1, 11), strict=True):
        launch.assert_given(size=10_000, parts=3, blocks=56, block=64, limit=limit)
        launch.assert_given(is_int8=format == "int8", tile=tile)
        assert launch.grid == grid
    assert [launch.num_warps for launch in launches] == [4, 4, 8]
    pack.assert_given(x=x, packed=(3, width))
    add.assert_given(packed=rows, total=(1, width))
    unpack.assert_given(vectors=2, x=(10_000,))
    assert total.shape == (1, width) and out.dtype == BF16


def test_parts_of_a_joined_norm_are_written_to_one_array(launches):
    x, dy = ones(11, 8, 20, dtype=BF16), ones(11, 8, 20, dtype=BF16)
    parts = ones(11, 3, 20, dtype=BF16), ones(11, 5, 20, dtype=BF16)
    y, rstd = joined_norm.joined_norm(parts, x, 1e-3)
    assert y.shape == x.shape and rstd.shape == (11, 8) and rstd.dtype == F32
    for with_dx in (True, False):
        options = dict(counts=(3, 5), with_dx=with_dx)
        dparts, dx = joined_norm.joined_norm_backward(dy, y, rstd, **options)
        assert [d.shape for d in dparts] == [d.shape for d in parts]
        assert dx.shape == x.shape if with_dx else dx is None
    kernels = "", "_backward", "_parts_backward"
    expected = [(f"joined_norm{name}_kernel", 2) for name in kernels for _ in parts]
    assert [(launch.kernel, launch.grid) for launch in launches] == expected
    for i, launch in enumerate(launches):
        rows, count, first = ((33, 3, 0), (55, 5, 3))[i % 2]
        launch.assert_given(rows=rows, count=count, first=first, n=8, d=20, block_m=32)
        operands = dict(dy=dy, y=y, rstd=rstd)
        operands = dict(part=parts[i], x=x, epsilon=1e-3) if i < 2 else operands
        launch.assert_given(block_n=32, **operands)
    # The first launch writes to new arrays, the others to those of the one before.
    expected = {}, {"y_before": "y", "rstd_before": "rstd"}, {}, {"dx_before": "dx"}
    assert tuple(launch.aliases for launch in launches[:4]) == expected
