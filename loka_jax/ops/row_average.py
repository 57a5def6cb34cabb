"""Averages over replicas of the rows that each replica has updated alone.

Inside of a `jax.shard_map` with `check_vma=False`. M replicas have a table each, with a
row optimizer's state, that were equal once. A row that none of them has touched since
is equal still, so that over the others alone

    w <- w0 + 1/M sum_m (w_m - w0)        likewise the state

is the average of whole tables. w0 is the row as it was, which a replica remembers when
it touches the row; on one that did not it is the row itself.

    remember    before each update, what is at its N places
    distinct    of all updates since, one entry for each row: its oldest
    average     all_gather over the replicas of (row, w_m - w0), one sum, w0 + sum / M

The sum has the same terms in the same order everywhere, so that replicas are equal bit
for bit after it, whatever the codec. All leaves are floats with a number, or D, a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, UInt32

from loka_jax.ops import embedding, row_codec
from loka_jax.ops.embedding import BAD_ID
from loka_jax.ops.row_codec import Codec
from loka_jax.triton import Implementation


class Remembered(NamedTuple):
    """Rows as they were when all replicas had the same.

    Attributes:
        rows: their numbers in this device's part of the table; `BAD_ID` if unused.
        state: of the row optimizer, for each of them.
    """

    rows: Int[Array, "N"]
    table: Float[Array, "N D"]
    state: PyTree[Float[Array, "N *_"]]


def remember(
    table: Float[Array, "P D"], state: PyTree, rows: Int[Array, "N"]
) -> tuple[tuple[Float[Array, "P D"], PyTree], Remembered]:
    """Returns table and state to go on with, and rows as they are.

    The same row may be there several times.
    """
    both, (old_table, old_state) = _read((table, state), rows)
    return both, Remembered(rows, old_table, old_state)


def distinct(
    updates: Sequence[Remembered], num_rows: int
) -> tuple[Remembered, Int[Array, ""]]:
    """Returns the oldest entry of each row, from the front, and their number.

    Args:
        updates: in the order of time.
        num_rows: P, of this device's part of the table; no result is longer.
    """
    every = jax.tree.map(lambda *parts: jnp.concatenate(parts), *updates)
    positions = jnp.arange(every.rows.size, dtype=jnp.int32)
    rows, positions = jax.lax.sort((every.rows, positions), num_keys=2)
    is_first = jnp.append(jnp.ones(min(1, rows.size), bool), rows[1:] != rows[:-1])
    is_first = is_first & (rows != BAD_ID)
    count = jnp.cumsum(is_first, dtype=jnp.int32)
    # Places beyond the length are dropped, as that of no row is.
    place = jnp.where(is_first, count - 1, BAD_ID)
    length = min(rows.size, num_rows)
    oldest = _write(jnp.full(length, BAD_ID, jnp.int32), place, rows)
    source = _write(jnp.zeros(length, jnp.int32), place, positions)
    _, table, state = jax.tree.map(lambda x: x[source], every)
    return Remembered(oldest, table, state), count[-1]


def average(
    table: Float[Array, "P D"],
    state: PyTree,
    before: Remembered,
    codec: Codec,
    axis: str,
    words: UInt32[Array, "2"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "P D"], PyTree]:
    """Returns table and state with the rows that any replica has touched averaged.

    Args:
        before: from `distinct`: all rows that this replica has changed.
        codec: of the changes of rows on the wire. Those of the state are float32.
        words: of this step and device, which decide how codes of 8 bits are rounded.
    """
    old = before.table, before.state
    both, now = _read((table, state), before.rows)
    table_change, state_change = jax.tree.map(
        lambda now, then: now.astype(jnp.float32) - then.astype(jnp.float32), now, old
    )
    payload = row_codec.encode(table_change, codec, (words, before.rows))
    payload = jax.lax.all_gather(payload, axis)
    rows, state_change = jax.tree.map(
        lambda x: jax.lax.all_gather(x, axis, tiled=True), (before.rows, state_change)
    )
    received = row_codec.decode(payload, codec, table.shape[1]).astype(jnp.float32)
    flat, unflatten = _columns((received.reshape(-1, table.shape[1]), state_change))
    ids, sums = embedding.sum_by_row(
        rows, flat, table.shape[0], implementation=implementation
    )
    means = unflatten(sums / jax.lax.axis_size(axis))
    restored, shared = _read(_write_rows(both, before.rows, old), ids)
    return _write_rows(restored, ids, jax.tree.map(jnp.add, shared, means))


def _columns(tree: PyTree):
    """Returns arrays [N, ...] side by side, and what takes them apart again."""
    leaves, structure = jax.tree.flatten(tree)
    flat = [leaf.reshape(len(leaf), -1) for leaf in leaves]
    ends = [sum(x.shape[1] for x in flat[: i + 1]) for i in range(len(flat))]

    def unflatten(columns: Float[Array, "N E"]) -> PyTree:
        parts = jnp.split(columns, ends[:-1], axis=1)
        return structure.unflatten(
            part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
        )

    return jnp.concatenate(flat, axis=1), unflatten


def _read(tree: PyTree, rows: Int[Array, "N"]) -> tuple[PyTree, PyTree]:
    """Returns the tree to go on with, and the rows of each leaf, zeros for `BAD_ID`."""
    values = jax.tree.map(
        lambda leaf: leaf.at[rows].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        ),
        tree,
    )
    # Else XLA reads late, and copies whole tables before they are written.
    return jax.lax.optimization_barrier((tree, values))


def _write_rows(tree: PyTree, rows: Int[Array, "N"], values: PyTree) -> PyTree:
    """Returns each leaf with its values at distinct rows."""
    return jax.tree.map(lambda leaf, new: _write(leaf, rows, new), tree, values)


def _write(into: Array, at: Int[Array, "N"], values: Array) -> Array:
    """Returns an array with values at distinct places, but not at `BAD_ID`."""
    return into.at[at].set(
        values.astype(into.dtype),
        mode="drop",
        unique_indices=True,
        wrap_negative_indices=False,
    )
