"""Checkpoints of tables in another order of rows: with a mesh, without one.

A run over a mesh keeps its tables in S = 256 virtual shards, which any mesh restores as
they are; a run without one in the order of their rows, S = 1. A checkpoint says which,
and is brought into the other order on the host where it must be.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from loka_jax.ops.row_order import Order, places_of
from loka_jax.ops.tables import Tables, TableSpec
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.leaves import from_host
from loka_jax.train.checkpoints.manifest import Saved

KEY = "virtual_shards"  # among a checkpoint's meta values; 1 if it is not there
_AT_A_TIME = 2**22  # rows, whose numbers take 40 bytes each
_OF_ROWS = ("table", "row_state")  # parts of a state with a row, or number, for each


class RowLayout(NamedTuple):
    """The order of the rows of a run, in `shards` virtual shards."""

    tables: Tables
    shards: int


def read_state(
    checkpoints: Checkpoints, saved: Saved, template: dict[str, Any], layout: RowLayout
) -> dict[str, Any]:
    """Returns parts of a checkpoint's state with its rows in the order of a layout.

    The template has the parts by name; arguments and errors are `Checkpoints.read`'s.
    """
    tables, shards = layout
    before = saved.meta.get(KEY, 1)
    if before == shards:
        return checkpoints.read(saved, template)

    def as_saved(path: Any, leaf: Any) -> Any:
        spec = _spec_of(path, tables)
        if spec is None:
            return leaf
        # A numpy leaf stays on the host; memory that is not written is not taken.
        places = Order(spec.total_rows, before).places
        return np.empty((places, *leaf.shape[1:]), leaf.dtype)

    def reordered(path: Any, leaf: Any, like: Any) -> Any:
        spec = _spec_of(path, tables)
        if spec is None:
            return leaf
        orders = (Order(spec.total_rows, count) for count in (before, shards))
        return from_host(_reordered(leaf, *orders), like)

    template_before = jax.tree_util.tree_map_with_path(as_saved, template)
    state = checkpoints.read(saved, template_before)
    return jax.tree_util.tree_map_with_path(reordered, state, template)


def _spec_of(path: Any, tables: Tables) -> TableSpec | None:
    """Returns the stack whose rows a leaf of a state has, or None."""
    part, *others = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if part not in _OF_ROWS:
        return None
    return tables if isinstance(tables, TableSpec) else tables.stacks[int(others[0])]


def _reordered(array: np.ndarray, before: Order, after: Order) -> np.ndarray:
    """Returns an array with its rows in another order, and zeros in places of none."""
    out = np.zeros((after.places, *array.shape[1:]), array.dtype)
    for first in range(0, before.rows, _AT_A_TIME):
        rows = np.arange(first, min(first + _AT_A_TIME, before.rows))
        out[places_of(rows, after)] = array[places_of(rows, before)]
    return out
