"""Embedding tables: stacked storage, lookups, and updates of the touched rows only.

The tables of a model are stacked into one array `[R, D]`, which is not among the
differentiated parameters. A step looks rows up, differentiates with respect to the
*rows*, sums the row gradients by id, and rewrites each touched row once. Its cost
depends on the number of looked-up ids, not on R.

A bad id (negative, or not below its field's number of rows) becomes `BAD_ID`, which
reads as a row of zeros and is never written. JAX's own indexing would wrap -1 to the
last row, and clamp other bad ids or return NaN for them.

Letters: B examples, F fields, H ids per field in a pooled lookup, D embedding dim,
R rows of all tables together, N row gradients of one step (B F, or B F H).
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from loka_jax.mapped import by_kernel
from loka_jax.ops import row_rounding
from loka_jax.ops.row_rounding import Rounding
from loka_jax.ops.tables import Pooling, TableSpec
from loka_jax.triton import Implementation, chosen, merge
from loka_jax.triton import row_update as _triton

# Larger than every row id, so that it sorts last and every write to it is dropped.
BAD_ID = 2**31 - 1

# Ids in a block of the segmented sum: 4 needs 1.5 times as many kernels on a GPU, and
# 16 takes three times as long on a CPU.
_FANOUT = 8


class UniqueRows(NamedTuple):
    """Row gradients with at most one entry per row.

    Attributes:
        ids: the touched rows in ascending order, with `BAD_ID` in the unused entries
            between them.
        grads: the summed gradient of each touched row; arbitrary in unused entries.
    """

    ids: Int[Array, "N"]
    grads: Float[Array, "N D"]


@runtime_checkable  # the tests' type checker calls isinstance
class RowOptimizer(Protocol):
    """An optimizer that updates each row of a table independently of the others.

    Every leaf of the state has R as its leading dim, so that the state of the
    touched rows can be gathered and written like the rows themselves.
    """

    def init(self, table: Float[Array, "R D"]) -> PyTree:
        """Returns the initial state of a table."""
        ...

    def update(
        self,
        rows: Float[Array, "N D"],
        row_state: Any,
        grads: Float[Array, "N D"],
        lr: Float[Array, ""] | float,
    ) -> tuple[Float[Array, "N D"], Any]:
        """Returns the new float32 rows and their new state."""
        ...


@runtime_checkable
class InPlaceRowOptimizer(RowOptimizer, Protocol):
    """A row optimizer with a kernel that sums the gradients and updates the rows."""

    def update_in_place(
        self,
        table: Float[Array, "R D"],
        opt_state: Any,
        ids: Int[Array, "N"],
        order: Int[Array, "N"],
        row_grads: Float[Array, "N D"],
        lr: Float[Array, ""] | float,
        rounding: Rounding | None = None,
    ) -> tuple[Float[Array, "R D"], Any]:
        """Returns table and state with every touched row updated once.

        Args:
            ids: sorted; `BAD_ID` marks unused entries.
            order: the position in `row_grads` of each id's gradient.
            rounding: of bfloat16 rows; None rounds to the nearest.
        """
        ...


class Rounded(NamedTuple):
    """A row optimizer whose bfloat16 rows are rounded stochastically in a step."""

    optimizer: RowOptimizer
    rounding: Rounding


def init_table(
    key: Array, spec: TableSpec, stddev: float = 1e-4
) -> Float[Array, "R D"]:
    """Returns the stacked tables, normal with mean 0 and `stddev`."""
    rows = stddev * jax.random.normal(key, (spec.total_rows, spec.dim), jnp.float32)
    return rows.astype(spec.dtype)


def flat_ids(
    spec: TableSpec, ids: Int[Array, "B F *H"], fields: slice = slice(None)
) -> Int[Array, "B F *H"]:
    """Returns the row in the stacked tables of each per-field id, or `BAD_ID`.

    `flat[b, f] = ids[b, f] + offsets[f]` where `0 <= ids[b, f] < rows[f]`. An id out
    of range never reaches another row; `count_bad_ids` counts those ids.

    Args:
        ids: one id or H ids of each of the fields.
        fields: which of the spec's fields these are; all by default.

    Raises:
        ValueError: if the ids are not int32 or have another number of fields than
            `spec`.
    """
    if ids.dtype != jnp.int32:
        raise ValueError(
            f"ids are {ids.dtype} and must be int32: JAX truncates int64 (2^33 + 5 "
            "becomes 5), so check the range on the host and cast there."
        )
    count = len(spec.rows[fields])
    if ids.shape[1] != count:
        raise ValueError(f"{ids.shape=} must have {count} fields in dim 1.")
    per_field = (1, count) + (1,) * (ids.ndim - 2)
    rows = jnp.asarray(spec.rows[fields], jnp.int32).reshape(per_field)
    offsets = jnp.asarray(spec.offsets[fields], jnp.int32).reshape(per_field)
    return jnp.where((ids >= 0) & (ids < rows), ids + offsets, BAD_ID)


def count_bad_ids(flat_ids: Int[Array, "*N"]) -> Int[Array, ""]:
    """Returns the number of `flat_ids` that are `BAD_ID`."""
    return jnp.sum(flat_ids == BAD_ID, dtype=jnp.int32)


def lookup(
    table: Float[Array, "R D"], flat_ids: Int[Array, "*N"]
) -> Float[Array, "*N D"]:
    """Returns the row of each id, zeros for `BAD_ID`.

    Call it outside the differentiated function and differentiate with respect to
    its result: the cotangent is the input of `update_rows`, and no gradient as large
    as the table exists.
    """
    return table.at[flat_ids].get(
        mode="fill", fill_value=0, wrap_negative_indices=False
    )


def lookup_pooled(
    table: Float[Array, "R D"],
    flat_ids: Int[Array, "B F H"],
    weights: Float[Array, "B F H"],
    pooling: Pooling = "sum",
) -> Float[Array, "B F D"]:
    """Returns the weighted sum or mean of the rows of each field.

    The sum is `out[b, f] = sum_h w[b, f, h] table[ids[b, f, h]]`, the mean that over
    `sum_h w[b, f, h]`. A bad id has weight 0 in both; a field whose weights are all 0
    gives zeros. Sums are float32, whatever the table is. `pooled_row_grads` is the
    backward pass.

    Args:
        weights: 1 for an id, 0 for padding, or any other non-negative weight.
    """
    scale = _pooling_weights(flat_ids, weights, pooling)
    rows = lookup(table, flat_ids).astype(jnp.float32)
    return jnp.sum(rows * scale[..., None], axis=2)


def pooled_row_grads(
    pooled_grads: Float[Array, "B F D"],
    flat_ids: Int[Array, "B F H"],
    weights: Float[Array, "B F H"],
    pooling: Pooling = "sum",
) -> tuple[Int[Array, "N"], Float[Array, "N D"]]:
    """Returns the ids and row gradients of a `lookup_pooled`, for `update_rows`.

    `grad[b, f, h] = w[b, f, h] pooled_grads[b, f]`, over `sum_h w` for the mean. An
    id of weight 0 becomes `BAD_ID`, so that padding touches no row.
    """
    scale = _pooling_weights(flat_ids, weights, pooling)
    grads = pooled_grads.astype(jnp.float32)[:, :, None] * scale[..., None]
    ids = jnp.where(scale != 0, flat_ids, BAD_ID)
    return ids.reshape(-1), grads.reshape(-1, grads.shape[-1])


def _pooling_weights(flat_ids, weights, pooling):
    weights = jnp.where(flat_ids == BAD_ID, 0, weights).astype(jnp.float32)
    if pooling == "sum":
        return weights
    if pooling == "mean":
        total = jnp.sum(weights, axis=-1, keepdims=True)
        return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0)
    raise ValueError(f"{pooling=} must be 'sum' or 'mean'.")


def sum_by_row(
    flat_ids: Int[Array, "*N"],
    row_grads: Float[Array, "*N D"],
    num_rows: int,
    *,
    implementation: Implementation | None = None,
) -> UniqueRows:
    """Returns the gradients summed over equal ids, with at most one entry per row.

    Ids are sorted (one radix sort of id and position), the gradients gathered in
    that order and added by a segmented sum in float32. The last entry of each run of
    equal ids holds the run's total. The others get `BAD_ID` and stay in place, because
    compacting the totals would cost another pass over `[N, D]` and save none.

    Deterministic: the additions form a fixed tree that depends only on N and on the
    runs, and no atomics are used. XLA lowers `segment_sum` and `.at[].add` to float
    atomics on a GPU, whose order, and so whose last bits, change from run to run;
    differences of a plain cumulative sum would lose small gradients. Besides the sort,
    `[N, D]` is read twice and written once, plus a seventh of that for all higher
    levels, in about 2 kernels for each of the log8(N) levels. Triton's kernels read it
    once and write only the totals, in a few launches, and sum along another tree.

    Args:
        flat_ids: ids in `[0, num_rows)`; all others are ignored.
        row_grads: float32 or bfloat16; both are summed in float32.
        implementation: "triton" requires its kernels; "xla"; None is Triton if it is
            installed, the GPU is a Hopper and its kernels support the operands, else
            XLA.

    Raises:
        ValueError: if Triton is required and cannot run.
    """
    ids, order = _sort(flat_ids, num_rows)
    grads = row_grads.reshape(-1, row_grads.shape[-1])
    return sum_sorted(ids, order, grads, implementation=implementation)


def sum_sorted(
    ids: Int[Array, "N"],
    order: Int[Array, "N"],
    grads: Float[Array, "N D"],
    *,
    implementation: Implementation | None = None,
) -> UniqueRows:
    """Returns what `sum_by_row` does, of ids that are sorted already.

    Args:
        order: the position in `grads` of each id's gradient.

    Raises:
        ValueError: if Triton is required and cannot run.
    """
    n, dim = grads.shape
    why_not = _triton.why_not(n, dim, grads.dtype)
    if chosen(implementation, why_not, "row_update") == "triton":
        sums = by_kernel(_triton.sum_runs, ids, order, grads)
    else:
        sums = _running_sums(ids, grads[order].astype(jnp.float32))
    is_last = jnp.append(ids[1:] != ids[:-1], jnp.ones(min(1, ids.size), bool))
    return UniqueRows(jnp.where(is_last, ids, BAD_ID), sums)


def _sort(
    flat_ids: Int[Array, "*N"], num_rows: int
) -> tuple[Int[Array, "N"], Int[Array, "N"]]:
    """Returns the sorted ids, `BAD_ID` if out of range, and their former positions."""
    ids = flat_ids.reshape(-1)
    ids = jnp.where((ids >= 0) & (ids < num_rows), ids, BAD_ID)
    positions = jnp.arange(ids.shape[0], dtype=jnp.int32)
    ids, order = jax.lax.sort((ids, positions), num_keys=1, is_stable=True)
    return ids, order


def _running_sums(ids: Int[Array, "N"], x: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """Returns the inclusive sums of `x` along each run of equal, sorted ids.

    `out[i] = sum_{j <= i, ids[j] = ids[i]} x[j]`. Entries are split into blocks of
    `_FANOUT`. The last running sums of the blocks form the same problem, 8 times
    smaller, and its solution is carried from each block into the next.
    """
    n, dim = x.shape
    if n <= 1:
        return x
    blocks = -(-n // _FANOUT)
    padding = blocks * _FANOUT - n
    # The padding follows all entries, so nothing is carried out of it.
    s = jnp.pad(ids, (0, padding), mode="edge").reshape(blocks, _FANOUT)
    v = jnp.pad(x, ((0, padding), (0, 0))).reshape(blocks, _FANOUT, dim)

    def along_block(first):  # select, not multiply: NaN stays in its own run
        sums = [first]
        for t in range(1, _FANOUT):
            same = (s[:, t] == s[:, t - 1])[:, None]
            sums.append(v[:, t] + jnp.where(same, sums[-1], 0))
        return sums

    first = v[:, 0]
    if blocks > 1:
        before = _running_sums(s[:, -1], along_block(first)[-1])[:-1]
        same = (s[1:, 0] == s[:-1, -1])[:, None]
        first = first + jnp.pad(jnp.where(same, before, 0), ((1, 0), (0, 0)))
    # Without the barrier XLA interleaves the chains inside one kernel and adds up each
    # prefix again: twice the time on an H200 (490 against 246 us, N = 1.7 M, D = 16).
    sums = jax.lax.optimization_barrier(along_block(first))
    return jnp.stack(sums, axis=1).reshape(-1, dim)[:n]


def update_rows(
    table: Float[Array, "R D"],
    opt_state: PyTree,
    flat_ids: Int[Array, "*N"],
    row_grads: Float[Array, "*N D"],
    optimizer: RowOptimizer | Rounded,
    lr: Float[Array, ""] | float,
    *,
    ascending: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "R D"], PyTree]:
    """Returns table and optimizer state with every touched row updated once.

    All other rows keep their bytes, and so do all rows if every id is `BAD_ID`, as on a
    step that is skipped, whatever the gradients are. The update is in place if the
    caller donates table and state to `jax.jit`; else each step copies the table.

    An id with a zero gradient is touched too: lazy Adam moves its row. Set the ids of
    padding examples to `BAD_ID` (`jnp.where(weights[:, None] > 0, ids, BAD_ID)`).

    Args:
        row_grads: the cotangent of `lookup`'s result, float32 or bfloat16.
        ascending: the ids of each row of `flat_ids` [K, C] ascend, so that Triton's
            kernel merges them where they would be sorted.
        implementation: as in `sum_by_row`. Triton sums and updates in one kernel for
            an `InPlaceRowOptimizer`, and only sums for others.

    Raises:
        ValueError: if Triton is required and cannot run.
    """
    optimizer, rounding = with_rounding(optimizer)
    num_rows = table.shape[0]
    grads = row_grads.reshape(-1, row_grads.shape[-1])
    n, dim = grads.shape
    why_not = _triton.why_not(n, dim, grads.dtype, table.dtype)
    families = ("row_update", "merge") if ascending else ("row_update",)
    implementation = chosen(implementation, why_not, *families)
    if implementation == "triton" and isinstance(optimizer, InPlaceRowOptimizer):
        if ascending and merge.why_not(len(flat_ids), flat_ids.size) is None:
            ids, order = by_kernel(merge.merge_lists, flat_ids)
        else:
            ids, order = _sort(flat_ids, num_rows)
        operands = (table, opt_state, ids, order, grads, jnp.asarray(lr))
        return by_kernel(optimizer.update_in_place, *operands, rounding)
    unique = sum_by_row(flat_ids, row_grads, num_rows, implementation=implementation)
    # Without it XLA recomputes the sums in each reader: +30 % time on a CPU.
    ids, grads = jax.lax.optimization_barrier(unique)

    def gather(leaf):
        return leaf.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)

    def scatter(leaf, new):
        return leaf.at[ids].set(
            new.astype(leaf.dtype),
            mode="drop",
            unique_indices=True,  # among the ids in range
            wrap_negative_indices=False,
        )

    rows = gather(table).astype(jnp.float32)
    row_state = jax.tree.map(gather, opt_state)
    rows, row_state = optimizer.update(rows, row_state, grads, lr)
    rows = row_rounding.stored(rows, ids, table.dtype, rounding)
    return scatter(table, rows), jax.tree.map(scatter, opt_state, row_state)


def with_rounding(
    optimizer: RowOptimizer | Rounded,
) -> tuple[RowOptimizer, Rounding | None]:
    """Returns a row optimizer, and how its rows are rounded; None to the nearest."""
    return optimizer if isinstance(optimizer, Rounded) else (optimizer, None)
