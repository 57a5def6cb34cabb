"""Groups of devices that update their rows alone, and average them every k steps.

`--mesh.sync weights`, the two-dimensional scheme of arXiv 2508.03854. M groups have all
tables each. With g_m the gradient of a row from the examples of group m, M times as
large as its part of the gradient of the whole batch, a step of each is

    w_m, v_m  <-  row optimizer(w_m, v_m, g_m)

and every k steps the rows that any of them has touched become the averages of w_m and
v_m over all (`row_average`), rows and the optimizer's state alike. With SGD and k = 1
that is the update by the gradient of the batch; AdaGrad squares gradients before they
are averaged, so that its sums grow faster (`optim.rows` has the factor c for that).

With k = 1 it is part of the step. Else it is a program of its own, and between two of
them the tables of the groups differ: nothing but training steps may read them then.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from loka_jax.ops import row_average
from loka_jax.ops.embedding import BAD_ID
from loka_jax.ops.row_average import Remembered
from loka_jax.ops.tables import Tables, TableSpec
from loka_jax.train.mesh.devices import (
    AXES,
    BATCH,
    REPLICA,
    SHARD,
    MeshConfig,
    map_shards,
    order_of,
    shardings,
)
from loka_jax.train.mesh.routing import capacity_for
from loka_jax.train.state import TrainState
from loka_jax.train.tables.stacks import by_stack, regroup
from loka_jax.train.tables.update import RowUpdate, update_table
from loka_jax.triton import Implementation
from loka_jax.unbiased import words_of

_ROWS = P(SHARD)


def update_alone(
    table,
    row_state,
    touched,
    row_update: RowUpdate,
    lr: Array | float,
    enabled: Array,
    wire: MeshConfig,
    words: UInt32[Array, "2"],
):
    """Returns a table and its optimizer's state after a step of this group.

    And the rows as they were, None if they have been averaged already.

    Args:
        touched: rows [K, C], and their gradients from this group.
        wire: how changes of rows travel, and when they are averaged.
    """
    rows, grads = touched
    rows = jnp.where(enabled, rows.reshape(-1), BAD_ID)
    grads = grads.reshape(-1, grads.shape[-1]).astype(jnp.float32)
    grads *= jax.lax.axis_size(REPLICA)
    parts, before = row_average.remember(table, row_state, rows)
    table, row_state = update_table(*parts, (rows, grads), row_update, lr, enabled)
    if wire.sync_every > 1:
        return table, row_state, before
    before, _ = row_average.distinct([before], len(table))
    averaged = row_average.average(
        *(table, row_state, before, wire.wire_gradients, REPLICA, words),
        implementation=row_update.implementation,
    )
    return *averaged, None


class RowSync:
    """Averages the rows of all groups every k steps, and whenever it is asked to.

    It has the rows that were touched since, as they were, for the tables that the last
    step has returned. Other tables are taken for equal on all groups.

    Attributes:
        capacity: the places of a list, for each stack.
    """

    def __init__(
        self,
        mesh: Mesh,
        wire: MeshConfig,
        tables: Tables,
        implementation: Implementation | None,
    ):
        """Prepares programs that compile when they first run."""
        self._mesh, self._tables, self._every = mesh, tables, wire.sync_every
        self._log: list[Any] = []
        self._table: Callable[[], Any] = lambda: None  # of the last step, if it is left
        self.capacity: Any = by_stack(lambda _: 0, tables)
        average = functools.partial(
            row_average.average,
            codec=wire.wire_gradients,
            axis=REPLICA,
            implementation=implementation,
        )
        self._distinct = jax.jit(functools.partial(_distinct, mesh, tables))
        self._average = jax.jit(
            functools.partial(_averaged, mesh, tables, average),
            static_argnums=0,
            donate_argnums=(1, 2),
            out_shardings=shardings(mesh, (_ROWS, _ROWS)),
        )

    def after(self, state: TrainState, new: TrainState, before: Any) -> TrainState:
        """Returns the `new` state after a step, its rows averaged if it is time.

        Args:
            before: from `update_alone`, by stack.
        """
        if not jax.tree.leaves(before):  # averaged already
            return new
        if self._table() is not _first_table(state):
            self._log.clear()
        self._log.append(before)
        self._table = weakref.ref(_first_table(new))
        return new if len(self._log) < self._every else self(new)

    def __call__(self, state: TrainState) -> TrainState:
        """Returns the state with the rows of all groups equal."""
        log, self._log = self._log, []
        if not log or self._table() is not _first_table(state):
            return state
        before, need = self._distinct(tuple(log))
        self.capacity = by_stack(
            self._enough, self._tables, self.capacity, jax.device_get(need), before
        )
        table, row_state = self._average(
            self.capacity, state.table, state.row_state, before, state.step
        )
        return dataclasses.replace(state, table=table, row_state=row_state)

    def _enough(self, _, capacity: int, need: Any, before: Remembered) -> int:
        """Returns the length of the lists of a stack: a rung, so that few compile."""
        most = before.rows.size // self._mesh.size
        return max(capacity, capacity_for(float(need), most))


def _distinct(mesh: Mesh, tables: Tables, log: tuple[Any, ...]):
    """Returns the oldest entries of all rows, and the most of any device, by stack."""

    def one(spec: TableSpec, *updates: Remembered):
        num_rows = order_of(spec).places // mesh.shape[SHARD]
        distinct, count = row_average.distinct(updates, num_rows)
        return distinct, jax.lax.pmax(count, AXES)

    def every(log):
        return regroup(tables, by_stack(one, tables, *log))

    return map_shards(every, mesh, BATCH, (BATCH, P()))(log)


def _averaged(mesh: Mesh, tables: Tables, average, capacity, *parts: Any):
    """Returns tables and optimizer's states with the rows in lists averaged.

    Args:
        capacity: entries of a list that are used, by stack.
        parts: tables, states, lists, and the number of the step.
    """

    def every(table, state, before, step):
        key = jax.random.fold_in(jax.random.key(0), step)
        (words,) = words_of(key, AXES, 1)

        def one(_, capacity: int, table, state, before: Remembered):
            before = jax.tree.map(lambda x: x[:capacity], before)
            return average(table, state, before, words=words)

        return regroup(tables, by_stack(one, tables, capacity, table, state, before))

    specs = _ROWS, _ROWS, BATCH, P()
    return map_shards(every, mesh, specs, (_ROWS, _ROWS))(*parts)


def _first_table(state: TrainState) -> Any:
    return jax.tree.leaves(state.table)[0]
