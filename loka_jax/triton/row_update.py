"""Sums of runs of equal ids, and embedding rows updated by them, by Triton.

The gradients are read once, in the order of their ids, and nothing as large as they
are is written in between: with `order` the positions sorted by id,

    s[i] = sum_{j: ids[j] = ids[i]} grads[order[j]]

in float32. Long runs are cut into blocks, whose sums are summed in turn: for a million
gradients three launches where D is 16, five where it is 256. The additions form a fixed
tree, without atomics, so that equal operands give equal bits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from loka_jax.triton.launch import launch, power_of_two, require_triton

_MOST_ENTRIES = 2**30  # positions are int32
_WIDEST = 512  # D
_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
# Settings. The first level gathers, and lives on many small programs at once; the later
# ones are small, and larger tiles save a launch.
_VALUES = 1024  # of a program's tile: entries by D
_CARRIED_VALUES = 8192
_FEWEST_POSITIONS = 32  # or the next level is hardly smaller
_VALUES_PER_THREAD = 8
_MOST_WARPS = 16


class Level(NamedTuple):
    """One launch.

    Attributes:
        n: its entries.
        positions: entries of a program.
        num_warps: warps of a program.
    """

    n: int
    positions: int
    num_warps: int

    @property
    def blocks(self) -> int:
        """Its programs; each hands two entries on to the next level."""
        return -(-self.n // self.positions)


def why_not(
    n: int, dim: int, dtype: DTypeLike, table_dtype: DTypeLike = jnp.float32
) -> str | None:
    """Returns why n row gradients are not served, or None if they are.

    Args:
        n: row gradients, duplicates included.
        dim: D, their dimension.
        dtype: of the gradients.
        table_dtype: of the table if there is one.
    """
    if n <= 0 or dim <= 0:
        return f"N={n}, D={dim}: there is nothing to add"
    if n > _MOST_ENTRIES:
        return f"N={n} is more than {_MOST_ENTRIES}"
    if dim > _WIDEST:
        return f"D={dim} is more than {_WIDEST}"
    for name in (jnp.dtype(dtype), jnp.dtype(table_dtype)):
        if name not in _DTYPES:
            return f"{name} is neither float32 nor bfloat16"
    return None


def sum_runs(
    ids: Int[Array, "N"], order: Int[Array, "N"], grads: Float[Array, "N D"]
) -> Float[Array, "N D"]:
    """Returns s[i], float32, where i is the last position of its run.

    What stands elsewhere, and where the id is `BAD_ID`, means nothing.

    Args:
        ids: int32, sorted, not below 0.
        order: int32, the position in `grads` of each of them.
        grads: float32 or bfloat16.

    Raises:
        ValueError: with the reason if these operands are not served.
        ImportError: if jax-triton is not installed.
    """
    _check("sum_runs", grads)
    n, dim = grads.shape
    require_triton()
    from loka_jax.triton import row_update_kernel  # not above: it imports Triton

    places, sums = order, None
    for depth, level in enumerate(levels(n, dim)):
        sums, ids, places, grads = launch(
            row_update_kernel.sum_runs_kernel,
            # The first level has no sums to go on with: some array stands for them.
            *(ids, places, grads, ids if sums is None else sums),
            outputs=[
                jax.ShapeDtypeStruct((n, dim), jnp.float32),
                jax.ShapeDtypeStruct((2 * level.blocks,), jnp.int32),
                jax.ShapeDtypeStruct((2 * level.blocks,), jnp.int32),
                jax.ShapeDtypeStruct((2 * level.blocks, dim), jnp.float32),
            ],
            aliases={} if sums is None else {3: 0},
            **_settings(level),
            constants=_constants(level, dim, depth),
        )
    assert sums is not None  # there is a first level
    return sums


def sgd(
    table: Float[Array, "R D"],
    ids: Int[Array, "N"],
    order: Int[Array, "N"],
    grads: Float[Array, "N D"],
    *,
    lr: Float[Array, ""] | float,
) -> Float[Array, "R D"]:
    """Returns the table after `table[ids[i]] -= lr s[i]`, once for each run.

    Rows that no id names keep their bytes. In place if the caller donates the table.

    Args:
        table: float32 or bfloat16; computed in float32.
        ids: of `sum_runs`, below R or `BAD_ID`, which names no row.
        order, grads: of `sum_runs`.
        lr: learning rate.

    Raises:
        ValueError: with the reason if these operands are not served.
        ImportError: if jax-triton is not installed.
    """
    table, _ = _update("sgd", table, None, ids, order, grads, lr, eps=0.0)
    return table


def rowwise_adagrad(
    table: Float[Array, "R D"],
    sum_of_squares: Float[Array, "R"],
    ids: Int[Array, "N"],
    order: Int[Array, "N"],
    grads: Float[Array, "N D"],
    *,
    lr: Float[Array, ""] | float,
    eps: float,
) -> tuple[Float[Array, "R D"], Float[Array, "R"]]:
    """Returns table and accumulators after one update of each run's row, r = ids[i]:

    `acc[r] += mean_D(s[i]^2);  table[r] -= lr s[i] / (sqrt(acc[r]) + eps)`.

    Rows that no id names keep their bytes. In place if the caller donates both.

    Args:
        table: float32 or bfloat16; computed in float32.
        sum_of_squares: float32, acc.
        ids: of `sum_runs`, below R or `BAD_ID`, which names no row.
        order, grads: of `sum_runs`.
        lr: learning rate.
        eps: added to the root.

    Raises:
        ValueError: with the reason if these operands are not served.
        ImportError: if jax-triton is not installed.
    """
    name, state = "rowwise_adagrad", sum_of_squares
    return _update(name, table, state, ids, order, grads, lr, eps=eps)


def _update(name, table, state, ids, order, grads, lr, *, eps):
    """Returns table and state; SGD where there is no state, else row-wise AdaGrad."""
    _check(name, grads, table.dtype)
    require_triton()
    from loka_jax.triton import row_update_kernel

    is_adagrad = state is not None
    lr = jnp.asarray(lr, jnp.float32).reshape(1)
    state = state if is_adagrad else lr  # some array, which no kernel touches
    n, dim = grads.shape
    for depth, level in enumerate(levels(n, dim)):
        table, state, ids, grads = launch(
            row_update_kernel.update_rows_kernel,
            *(ids, order, grads, lr, table, state),
            outputs=[
                jax.ShapeDtypeStruct(table.shape, table.dtype),
                jax.ShapeDtypeStruct(state.shape, state.dtype),
                jax.ShapeDtypeStruct((2 * level.blocks,), jnp.int32),
                jax.ShapeDtypeStruct((2 * level.blocks, dim), jnp.float32),
            ],
            aliases={4: 0, 5: 1} if is_adagrad else {4: 0},
            **_settings(level),
            constants=_constants(level, dim, depth)
            | dict(is_adagrad=is_adagrad, eps=eps),
        )
    return table, state


def levels(n: int, dim: int) -> list[Level]:
    """Returns the launches for n entries: the last one is a single program."""
    tile_dim = power_of_two(dim)
    found: list[Level] = []
    while not found or found[-1].blocks > 1:
        values = _CARRIED_VALUES if found else _VALUES
        n = 2 * found[-1].blocks if found else n
        positions = min(values // tile_dim, power_of_two(n))
        positions = max(positions, _FEWEST_POSITIONS)
        warps = positions * tile_dim // (32 * _VALUES_PER_THREAD)
        found.append(Level(n, positions, min(max(warps, 1), _MOST_WARPS)))
    return found


def _settings(level: Level) -> dict[str, Any]:
    return dict(grid=level.blocks, num_warps=level.num_warps, num_stages=1)


def _constants(level: Level, dim: int, depth: int) -> dict[str, Any]:
    return dict(
        n=level.n,
        dim=dim,
        is_carried=depth > 0,
        positions=level.positions,
        tile_dim=power_of_two(dim),
    )


def _check(name: str, grads: jax.Array, table_dtype: DTypeLike = jnp.float32) -> None:
    n, dim = grads.shape
    reason = why_not(n, dim, grads.dtype, table_dtype)
    if reason is not None:
        raise ValueError(f"{name}: {reason}.")
