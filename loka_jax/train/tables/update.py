"""One update of the embedding rows that a step has touched."""

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array

from loka_jax.ops import embedding, row_rounding
from loka_jax.ops.row_order import Order
from loka_jax.optim import whole_table_update


class RowUpdate(NamedTuple):
    """How embedding rows are updated.

    Attributes:
        optimizer: a row optimizer of `loka_jax.optim`.
        learning_rate: schedule of the learning rate, before `TrainState.lr_scale`.
        l2: weight of the squared norm of the whole table in the loss; if positive,
            every row is updated every step.
        implementation: "xla" to use XLA only; None to use kernels where they apply.
        rounding_seed: of the stochastic rounding of bfloat16 tables; None rounds to the
            nearest.
    """

    optimizer: Any
    learning_rate: optax.Schedule
    l2: float
    implementation: Literal["xla"] | None = None
    rounding_seed: int | None = None

    def at_step(
        self, step: Array, order: Order, dim: int, first_shard: Array | int = 0
    ) -> "RowUpdate":
        """Returns the update of a stack in a step, with the rounding of its rows.

        Args:
            first_shard: the first virtual shard of this device's part of it.
        """
        if self.rounding_seed is None:
            return self
        rounding = row_rounding.of_step(
            self.rounding_seed, step, order, dim, first_shard
        )
        return self._replace(optimizer=embedding.Rounded(self.optimizer, rounding))


def update_table(
    table, row_state, touched, row_update: RowUpdate, lr, enabled, ascending=False
):
    """Returns one table, or a device's part of it, and its state after a step.

    Args:
        touched: ids of rows, and their gradients.
        ascending: as in `embedding.update_rows`.
    """
    ids, row_grads = touched
    optimizer, implementation = row_update.optimizer, row_update.implementation
    if row_update.l2 > 0:
        total = embedding.sum_by_row(
            ids, row_grads, table.shape[0], implementation=implementation
        )
        return whole_table_update(
            table, row_state, total, optimizer, lr, row_update.l2, enabled=enabled
        )
    ids = jnp.where(enabled, ids, embedding.BAD_ID)
    how: Any = {"ascending": ascending, "implementation": implementation}
    operands = table, row_state, ids, row_grads, optimizer, lr
    return embedding.update_rows(*operands, **how)
