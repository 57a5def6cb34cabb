"""Row optimizers for embedding tables.

A row optimizer updates the touched rows of a table from their summed gradients
(`ops.embedding.update_rows`), or all rows at once (`whole_table_update`), each row
independently of the others. Every leaf of its state has R, the number of rows, as
leading dim. Rows, state and gradients are float32 inside the update.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from loka_jax.ops import embedding, row_rounding
from loka_jax.ops.row_rounding import Rounding
from loka_jax.triton import row_update

Rows = Float[Array, "N D"]


class RowwiseAdagradState(NamedTuple):
    """One number per row: the sum of its mean squared gradients."""

    sum_of_squares: Float[Array, "R"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Adagrad:
    """AdaGrad with one accumulator per row instead of one per entry.

    Attributes:
        c: divides the accumulators where a row is updated, not where they are kept.
    """

    eps: float = 1e-8
    initial_accumulator: float = 0.0
    c: float = 1.0

    def __post_init__(self):
        _check_positive("eps", self.eps)
        _check_positive("c", self.c)
        if not 0 <= self.initial_accumulator < math.inf:
            raise ValueError(
                f"initial_accumulator={self.initial_accumulator} must be finite "
                "and at least 0."
            )

    def init(self, table: Float[Array, "R D"]) -> RowwiseAdagradState:
        """Returns the initial state of a table."""
        start = jnp.full(table.shape[:1], self.initial_accumulator, jnp.float32)
        return RowwiseAdagradState(start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad(_Adagrad):
    """Row-wise AdaGrad.

    `acc += mean_D(g^2);  row -= lr g / (sqrt(acc / c) + eps)` with g the row's *summed*
    gradient. Duplicates are summed before they are squared, as in FBGEMM's
    `EXACT_ROWWISE_ADAGRAD` and torchrec's `RowWiseAdagrad`.

    With c = 1 it is that. c > 1 is the momentum-scaled row-wise AdaGrad of groups that
    update alone (`--mesh.sync weights`): the gradient of a group of 1/M of the batch is
    noisier than that of all of it, and its square up to M times as large, as it is for
    a row that one group alone has. It is nothing but `sqrt(c)` times lr and eps.

    References:
        Zhang et al.: Two-dimensional Sparse Parallelism for Large Scale Deep Learning
        Recommendation Model Training. arXiv 2508.03854: c = M, with eps in the root.
    """

    def update(
        self, rows: Rows, row_state: RowwiseAdagradState, grads: Rows, lr
    ) -> tuple[Rows, RowwiseAdagradState]:
        """Returns the updated rows and their new state."""
        acc = row_state.sum_of_squares + jnp.mean(jnp.square(grads), axis=-1)
        step = lr * grads / (jnp.sqrt(acc / self.c) + self.eps)[:, None]
        return rows - step, RowwiseAdagradState(acc)

    def update_in_place(
        self, table, opt_state, ids, order, row_grads, lr, rounding=None
    ) -> tuple[Array, RowwiseAdagradState]:
        """Returns table and state, the rows of `ids` updated by Triton's kernels."""
        root = math.sqrt(self.c)
        table, acc = row_update.rowwise_adagrad(
            *(table, opt_state.sum_of_squares, ids, order, row_grads),
            lr=root * lr,
            eps=root * self.eps,
            noise=_noise(rounding),
        )
        return table, RowwiseAdagradState(acc)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaggedRowwiseAdagrad(_Adagrad):
    """Row-wise AdaGrad whose step is divided by the accumulator before that step.

    `row -= lr g / (sqrt(max(acc, mean_D(g^2)) / c) + eps);  acc += mean_D(g^2)`. Groups
    that update alone then divide by the average that all of them have, so that the mean
    of their steps is that of the mean of their gradients, but for a gradient that is
    larger than all before it together, as a row's first one is. Divided by what came
    before, such steps have no bound: a first gradient can be next to 0.
    """

    def update(
        self, rows: Rows, row_state: RowwiseAdagradState, grads: Rows, lr
    ) -> tuple[Rows, RowwiseAdagradState]:
        """Returns the updated rows and their new state."""
        before, squares = row_state.sum_of_squares, jnp.mean(jnp.square(grads), axis=-1)
        largest = jnp.maximum(before, squares)
        step = lr * grads / (jnp.sqrt(largest / self.c) + self.eps)[:, None]
        return rows - step, RowwiseAdagradState(before + squares)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd:
    """Plain gradient descent: `row -= lr g`. No state."""

    def init(self, table: Float[Array, "R D"]) -> tuple[()]:
        """Returns the empty state."""
        return ()

    def update(
        self, rows: Rows, row_state: tuple[()], grads: Rows, lr
    ) -> tuple[Rows, tuple[()]]:
        """Returns the updated rows and the empty state."""
        return rows - lr * grads, ()

    def update_in_place(
        self, table, opt_state, ids, order, row_grads, lr, rounding=None
    ) -> tuple[Array, tuple[()]]:
        """Returns the table with the rows of `ids` updated by Triton's kernels."""
        operands = table, ids, order, row_grads
        return row_update.sgd(*operands, lr=lr, noise=_noise(rounding)), ()


class AdamState(NamedTuple):
    """Moments of each entry, and the number of updates of each row."""

    m: Float[Array, "R D"]
    v: Float[Array, "R D"]
    count: Int[Array, "R"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adam:
    """Lazy Adam: a row's moments change only when the row is touched.

    `m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;`
    `row -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`,
    with t the number of updates of *this row*. With a global t, as in torch's
    `SparseAdam` and FBGEMM, a row first seen late would get no bias correction: its
    first step would be `(1 - b1) / sqrt(1 - b2)` = 3.2 times too large. If every row
    is updated every step (`whole_table_update`), both are plain Adam (Kingma and Ba,
    arXiv:1412.6980, algorithm 1).
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self):
        _check_positive("eps", self.eps)
        for name, value in (("b1", self.b1), ("b2", self.b2)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be in [0, 1).")

    def init(self, table: Float[Array, "R D"]) -> AdamState:
        """Returns the initial state of a table."""
        return AdamState(
            m=jnp.zeros(table.shape, jnp.float32),
            v=jnp.zeros(table.shape, jnp.float32),
            count=jnp.zeros(table.shape[:1], jnp.int32),
        )

    def update(
        self, rows: Rows, row_state: AdamState, grads: Rows, lr
    ) -> tuple[Rows, AdamState]:
        """Returns the updated rows and their new state."""
        m = self.b1 * row_state.m + (1 - self.b1) * grads
        v = self.b2 * row_state.v + (1 - self.b2) * jnp.square(grads)
        count = row_state.count + 1
        t = count.astype(jnp.float32)[:, None]
        m_hat = m / (1 - self.b1**t)
        v_hat = v / (1 - self.b2**t)
        step = lr * m_hat / (jnp.sqrt(v_hat) + self.eps)
        return rows - step, AdamState(m, v, count)


def whole_table_update(
    table: Float[Array, "R D"],
    opt_state: PyTree,
    summed: embedding.UniqueRows,
    optimizer: embedding.RowOptimizer | embedding.Rounded,
    lr: Float[Array, ""] | float,
    l2: Float[Array, ""] | float,
    *,
    enabled: Bool[Array, ""],
) -> tuple[Float[Array, "R D"], PyTree]:
    """Returns table and state after an update of *every* row, with L2 regularization.

    `summed` are the row gradients from `embedding.sum_by_row`. The gradient is that of
    `loss + l2 / 2 sum(table^2)`, `g[r] = summed[r] + l2 table[r]`. This is FuxiCTR's
    `embedding_regularizer`, used for the published BARS numbers: it also shrinks rows
    that are not in the batch. With `Adam` it equals `optax.adam` on that gradient.
    Time and memory are O(R), with a few temporary `[R, D]` arrays, so it suits tables
    of up to about 10^6 rows. Nothing changes if `enabled` is False.
    """
    optimizer, rounding = embedding.with_rounding(optimizer)
    ids, grads = summed
    old = table.astype(jnp.float32)
    dense = (
        (l2 * old)
        .at[ids]
        .add(grads, mode="drop", unique_indices=True, wrap_negative_indices=False)
    )
    rows, state = optimizer.update(old, opt_state, dense, lr)

    def if_enabled(new, old):
        return jnp.where(enabled, new, old)

    every = jnp.arange(len(table), dtype=jnp.int32)
    rows = row_rounding.stored(rows, every, table.dtype, rounding)
    table = if_enabled(rows, table)
    return table, jax.tree.map(if_enabled, state, opt_state)


def _noise(rounding: Rounding | None) -> row_update.Noise | None:
    if rounding is None:
        return None
    return row_update.Noise(rounding.words, rounding.depth, rounding.shards)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be positive and finite.")
