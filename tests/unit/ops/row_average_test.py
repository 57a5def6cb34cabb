"""Averages over replicas of the rows that each has updated alone.

Replicas are examples of `vmap` here; meshes are in tests/whole.
"""

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.ops import row_average
from loka_jax.ops.embedding import BAD_ID
from loka_jax.optim.rows import RowwiseAdagradState


def test_rows_that_any_replica_has_touched_are_averages_of_all():
    rng = np.random.default_rng(0)
    before = rng.normal(size=(6, 2)).astype(np.float32)
    acc = np.arange(6, dtype=np.float32)
    # Rows of each replica's two steps: 0 of both, 1 of one twice, 4 of the other.
    steps = np.int32([[[0, 1, BAD_ID], [1, 0, BAD_ID]], [[0, BAD_ID, 4], [4, 4, 4]]])
    changes = rng.normal(size=(2, 6, 2)).astype(np.float32)

    def replica(steps, change):
        table, state, remembered = jnp.asarray(before), jnp.asarray(acc), []
        state = RowwiseAdagradState(state)
        for i, rows in enumerate(steps):
            (table, state), old = row_average.remember(table, state, rows)
            remembered.append(old)
            table = table.at[rows].add((i + 1) * change[rows], mode="drop")
            after = state.sum_of_squares.at[rows].set(10.0 + i, mode="drop")
            state = RowwiseAdagradState(after)
        oldest, count = row_average.distinct(remembered, len(before))
        mean = row_average.average(
            table, state, oldest, "f32", "d", jnp.zeros(2, jnp.uint32)
        )
        return table, state.sum_of_squares, oldest.rows, count, mean

    tables, accs, rows, counts, (mean, state) = jax.jit(
        jax.vmap(replica, axis_name="d")
    )(steps, changes)
    assert counts.tolist() == [2, 2]
    expected = [[0, 1, *[BAD_ID] * 4], [0, 4, *[BAD_ID] * 4]]
    np.testing.assert_array_equal(rows, expected)
    for found, each in ((mean, tables), (state.sum_of_squares, accs)):
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_allclose(found[0], np.mean(each, axis=0), rtol=1e-6)
        untouched = np.array([2, 3, 5])
        np.testing.assert_array_equal(found[0][untouched], each[0][untouched])
