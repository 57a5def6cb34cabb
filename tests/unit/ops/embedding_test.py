"""Embedding tables: ids, lookups, pooling, sums by row, and updates of touched rows."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import embedding
from loka_jax.optim.rows import Adam, RowwiseAdagrad
from tests import support

BAD_ID = embedding.BAD_ID
SPEC = embedding.TableSpec(rows=(3, 5, 2), dim=4)
flat_ids = jax.jit(embedding.flat_ids, static_argnums=(0, 2))
sum_by_row = jax.jit(embedding.sum_by_row, static_argnums=2)
update_rows = jax.jit(embedding.update_rows, static_argnums=4)


def zipf_ids(seed, shape, rows):
    """Returns ids of which few are many."""
    ids = np.random.default_rng(seed).zipf(1.3, shape) - 1
    return np.minimum(ids, rows - 1).astype(np.int32)


def summed(ids, grads, rows):
    """Returns gradients added by row in float64."""
    ids, grads = np.ravel(ids), np.asarray(grads, np.float64)
    out = np.zeros((rows, grads.shape[-1]))
    good = (ids >= 0) & (ids < rows)
    np.add.at(out, ids[good], grads.reshape(ids.size, out.shape[1])[good])
    return out


def as_dense(unique, rows):
    """Returns the rows of a UniqueRows, each of which must stand there once."""
    used = np.asarray(unique.ids) != BAD_ID
    ids = np.asarray(unique.ids)[used]
    assert np.all(np.diff(ids) > 0)
    out = np.zeros((rows, unique.grads.shape[-1]))
    out[ids] = np.asarray(unique.grads)[used]
    return out


def test_ids_out_of_range_become_bad_ids_and_are_counted():
    low, high = -(2**31), 2**31 - 1
    ids = np.int32([[0, 4, 1], [-1, 5, low], [3, high, 0]])
    flat = flat_ids(SPEC, ids)
    expected = [[0, 7, 9], [BAD_ID, BAD_ID, BAD_ID], [BAD_ID, BAD_ID, 8]]
    np.testing.assert_array_equal(flat, expected)
    assert int(embedding.count_bad_ids(flat)) == 5
    # Of some fields, and of lists of ids.
    last = flat_ids(SPEC, np.stack([ids[:, 1:]] * 2, -1), slice(1, 3))
    np.testing.assert_array_equal(last[..., 1], np.asarray(expected)[:, 1:])


def test_lookup_reads_the_rows_of_each_field_and_zeros_for_bad_ids():
    table, ids = support.normal(10, 4), jnp.asarray([[2, 3, 9], [-1, 7, 10]], jnp.int32)
    rows = jax.jit(embedding.lookup)(table, ids)
    expected = np.asarray(table)[np.where(ids == 10, -1, ids)]
    expected[1, [0, 2]] = 0
    np.testing.assert_array_equal(rows, expected)


def test_init_table_has_the_asked_deviation():
    spec = embedding.TableSpec(rows=(500, 500), dim=8, storage="bf16")
    init = jax.jit(lambda key: embedding.init_table(key, spec, stddev=1e-2))
    table = init(jax.random.key(0))
    assert table.dtype == jnp.bfloat16 and table.shape == (1000, 8)
    # Five deviations of the deviation of 8,000 normal values.
    assert abs(np.std(np.float64(table)) / 1e-2 - 1) < 5 / 16000**0.5


@functools.partial(jax.jit, static_argnums=4)
def pooled_both_ways(table, ids, weights, grads, pooling):
    """Returns a pooled lookup, ids and row gradients, and the table's gradient."""
    lookup = lambda table: embedding.lookup_pooled(table, ids, weights, pooling)  # noqa: E731
    out, pull = jax.vjp(lookup, table)
    rows = embedding.pooled_row_grads(grads, ids, weights, pooling)
    return out, rows, pull(grads)[0]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_pooled_lookups_and_their_row_gradients_match_numpy(pooling):
    table, grads = support.normal(10, 4), support.normal(6, 3, 4, seed=1)
    ids = zipf_ids(1, (6, 3, 5), 10)
    ids[0, 0, 1] = BAD_ID
    weights = np.random.default_rng(2).integers(0, 3, ids.shape).astype(np.float32)
    weights[1, 1] = 0  # nothing to pool
    out, (row_ids, row_grads), of_table = pooled_both_ways(
        table, ids, weights, grads, pooling
    )
    used = np.where(ids == BAD_ID, 0, weights).astype(np.float64)
    if pooling == "mean":
        used /= np.maximum(used.sum(-1, keepdims=True), 1e-30)
    rows = np.asarray(table, np.float64)[np.where(ids < 10, ids, 0)]
    expected = np.einsum("bfh,bfhd->bfd", used, rows)
    atol = support.sum_error(6, np.abs(table).max() * used.sum(-1).max())
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=atol)
    np.testing.assert_array_equal(out[1, 1], 0)
    # Padding touches no row: lazy Adam would move it.
    np.testing.assert_array_equal(row_ids, np.where(used > 0, ids, BAD_ID).ravel())
    exact = used[..., None] * np.asarray(grads, np.float64)[:, :, None]
    np.testing.assert_allclose(row_grads, exact.reshape(-1, 4), rtol=1e-6)
    dense = summed(row_ids, row_grads, 10)
    np.testing.assert_allclose(dense, of_table, rtol=1e-5, atol=1e-5)


def test_runs_of_all_lengths_are_kept_apart_with_their_faults_and_sizes():
    # Runs that begin and end within blocks of the sum and at their bounds.
    lengths = [1, 7, 8, 9, 63, 64, 65, 1, 2, 50, 50]
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    rng = np.random.default_rng(0)
    grads = np.repeat(np.float32([[1.0, 2.0]]), ids.size, axis=0)
    grads[ids == 9], grads[ids == 10] = 1e20, 1e-20
    first = np.flatnonzero(ids == 5)
    grads[first[3]], grads[first[9]] = np.nan, np.inf
    mixed = rng.permutation(ids.size)
    unique = sum_by_row(ids[mixed], grads[mixed], 11)
    found = as_dense(unique, 11)
    expected = np.outer(lengths, [1.0, 2.0])
    expected[9], expected[10], expected[5] = 50e20, 50e-20, np.nan
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_ids_out_of_range_are_left_out_and_bfloat16_is_summed_in_float32():
    # In bfloat16 the sum would stay at 256: 256 + 1 rounds to 256.
    ids = np.int32([0] * 594 + [-1, 3, 4, BAD_ID, 3, -(2**31)])
    unique = sum_by_row(ids, jnp.ones((600, 3), jnp.bfloat16), 4)
    assert unique.grads.dtype == jnp.float32
    assert np.sort(unique.ids).tolist() == [0, 3] + [BAD_ID] * 598
    np.testing.assert_array_equal(as_dense(unique, 4)[[0, 3], 0], [594, 2])


def test_sums_hold_no_scatter_whose_order_is_free():
    ids, grads = jnp.zeros(1000, jnp.int32), jnp.zeros((1000, 4))
    assert "scatter" not in sum_by_row.lower(ids, grads, 50).as_text()


def test_only_touched_rows_move_and_none_without_an_id():
    table, optimizer = support.normal(50, 4), Adam()
    state = jax.tree.map(lambda x: x + 1, optimizer.init(table))
    ids = jnp.asarray([3, 3, 49, 0, -1, 50, BAD_ID], jnp.int32)
    grads = support.normal(7, 4, seed=1)
    new = update_rows(table, state, ids, grads, optimizer, 0.1)
    moved = np.isin(np.arange(50), [0, 3, 49])
    pairs = zip(*map(jax.tree.leaves, ((table, state), new)), strict=True)
    for before, after in pairs:
        has_moved = np.any((before != after).reshape(50, -1), axis=1)
        np.testing.assert_array_equal(has_moved, moved)
    grads = grads * jnp.nan
    new = update_rows(table, state, ids * 0 + BAD_ID, grads, optimizer, 0.1)
    chex.assert_trees_all_equal(new, (table, state))


def test_a_donated_update_holds_no_second_table():
    optimizer, array = RowwiseAdagrad(), jax.ShapeDtypeStruct
    table = array((200_000, 16), jnp.float32)
    state = jax.eval_shape(optimizer.init, table)

    def step(table, state, ids, grads):
        grads = embedding.lookup(table, ids) * grads
        return embedding.update_rows(table, state, ids, grads, optimizer, 0.1)

    operands = array((8,), jnp.int32), array((8, 16), jnp.float32)
    donating = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, *operands)
    memory = donating.compile().memory_analysis()
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((table, state)))
    assert memory.alias_size_in_bytes >= held
    # N-sized buffers only: even one float a row would take 800,000 bytes.
    assert memory.temp_size_in_bytes < 100_000
