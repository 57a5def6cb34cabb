"""Checkpoints of one order of rows, read in another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops.row_order import Order, places_of
from loka_jax.ops.tables import TableSpec, with_dims
from loka_jax.optim.rows import AdamState, RowwiseAdagradState
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.row_layout import KEY, RowLayout, read_state

ONE = TableSpec(rows=(200, 321), dim=3)


def in_order(array, shards):
    """Rows 0, 1, 2 ... of an array in an order of virtual shards."""
    order = Order(len(array), shards)
    out = np.zeros((order.places, *array.shape[1:]), array.dtype)
    out[places_of(np.arange(len(array)), order)] = array
    return out


def state_of(shards):
    """A state of two stacks, in which every number says whose it is."""
    tables = with_dims(ONE, (3, 2))
    ids = [np.arange(stack.total_rows, dtype=np.float32) for stack in tables.stacks]
    rows = [
        in_order(np.stack([x, -x, x + 0.5][: s.dim], axis=1), shards)
        for x, s in zip(ids, tables.stacks, strict=True)
    ]
    counts = in_order(ids[1].astype(np.int32), shards)
    first, second = (in_order(x, shards) for x in ids)
    adam = AdamState(rows[1] * 2, second[:, None] + rows[1], counts)
    state = {
        "params": {"kernel": np.arange(5.0, dtype=np.float32)},
        "table": tuple(rows),
        "row_state": (RowwiseAdagradState(first), adam),
    }
    return RowLayout(tables, shards), jax.tree.map(jnp.asarray, state)


@pytest.mark.parametrize("before, after", [(1, 256), (256, 1), (256, 256)])
def test_rows_are_found_in_any_order(tmp_path, before, after):
    _, state = state_of(before)
    layout, want = state_of(after)
    meta = {} if before == 1 else {KEY: before}  # early runs do not say
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, meta)
        saved = checkpoints.newest()
        assert saved is not None
        found = read_state(checkpoints, saved, want, layout)
    jax.tree.map(np.testing.assert_array_equal, found, want)
