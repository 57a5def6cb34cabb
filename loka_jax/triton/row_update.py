"""Sums of runs of equal ids, and updates of embedding rows by them, in Triton.

The gradients are read once, in the order of their ids, without an intermediate array of
their size: with `order` the positions sorted by id,

    s[i] = sum_{j: ids[j] = ids[i]} grads[order[j]]

in float32. Long runs are cut into blocks, whose sums are summed in turn: a million
gradients take three launches for D = 16, five for D = 256. The additions form a fixed
tree, without atomics, so that equal operands give equal bits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from loka_jax.triton.launch import launch, power_of_two, require_triton

_MAX_ENTRIES = 2**30  # positions are int32
_MAX_DIM = 512
_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
_VALUES_PER_THREAD = 8
_MAX_WARPS = 16


class TuningConfig(NamedTuple):
    """The tunable parameters of the launches.

    The first level gathers, and is fastest with many small programs in flight; later
    levels are small, and larger tiles save a launch.

    Attributes:
        values: values in a program's tile, entries by D, on the first level.
        carried_values: the same on later levels.
        min_positions: entries of a program; fewer hardly shrink the next level.
    """

    values: int = 1024
    carried_values: int = 8192
    min_positions: int = 32


CONFIG = TuningConfig()  # of all launches


class Level(NamedTuple):
    """One launch."""

    n: int
    positions: int
    num_warps: int

    @property
    def blocks(self) -> int:
        """Number of programs; each carries two entries to the next level."""
        return -(-self.n // self.positions)


class Noise(NamedTuple):
    """What the random bits are made of that round bfloat16 rows, as `ops.row_rounding`.

    Attributes:
        words: two of the step, and the first virtual shard of the table.
        shards: virtual shards in all, a power of two.
    """

    words: UInt32[Array, "3"]
    depth: int
    shards: int


def why_not(
    n: int, dim: int, dtype: DTypeLike, table_dtype: DTypeLike = jnp.float32
) -> str | None:
    """Returns why n row gradients are not served, or None if they are."""
    if n <= 0 or dim <= 0:
        return f"N={n}, D={dim}: there is nothing to add"
    if n > _MAX_ENTRIES:
        return f"N={n} is more than {_MAX_ENTRIES}"
    if dim > _MAX_DIM:
        return f"D={dim} is more than {_MAX_DIM}"
    for name in (jnp.dtype(dtype), jnp.dtype(table_dtype)):
        if name not in _DTYPES:
            return f"{name} is neither float32 nor bfloat16"
    return None


def sum_runs(
    ids: Int[Array, "N"], order: Int[Array, "N"], grads: Float[Array, "N D"]
) -> Float[Array, "N D"]:
    """Returns s[i], float32, where i is the last position of its run.

    Other entries, and those of `BAD_ID`, are undefined.

    Args:
        order: int32, the position of each in `grads`.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
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
            # The first level has no sums so far: any array will do.
            *(ids, places, grads, ids if sums is None else sums),
            outputs=[
                jax.ShapeDtypeStruct((n, dim), jnp.float32),
                jax.ShapeDtypeStruct((2 * level.blocks,), jnp.int32),
                jax.ShapeDtypeStruct((2 * level.blocks,), jnp.int32),
                jax.ShapeDtypeStruct((2 * level.blocks, dim), jnp.float32),
            ],
            aliases={} if sums is None else {3: 0},
            **_launch_options(level),
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
    noise: Noise | None = None,
) -> Float[Array, "R D"]:
    """Returns the table after `table[ids[i]] -= lr s[i]`, once for each run.

    Other rows keep their bytes. In place if the caller donates the table.

    Args:
        ids: of `sum_runs`; below R, or `BAD_ID` for no row.
        noise: rounds a bfloat16 table stochastically; None rounds to the nearest.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    table, _ = _update("sgd", table, None, (ids, order, grads), lr, 0.0, noise)
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
    noise: Noise | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "R"]]:
    """Returns table and accumulators after one update of each run's row, r = ids[i]:

    `acc[r] += mean_D(s[i]^2);  table[r] -= lr s[i] / (sqrt(acc[r]) + eps)`.

    Other rows keep their bytes. In place if the caller donates both.

    Args:
        ids: of `sum_runs`; below R, or `BAD_ID` for no row.
        noise: rounds a bfloat16 table stochastically; None rounds to the nearest.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    name, state = "rowwise_adagrad", sum_of_squares
    return _update(name, table, state, (ids, order, grads), lr, eps, noise)


def _update(name, table, state, entries, lr, eps, noise):
    """Returns table and state after SGD if there is no state, else row-wise AdaGrad."""
    ids, order, grads = entries
    _check(name, grads, table.dtype)
    require_triton()
    from loka_jax.triton import row_update_kernel

    is_adagrad = state is not None
    lr = jnp.asarray(lr, jnp.float32).reshape(1)
    # Any array where there is none: the kernel does not touch it.
    state = state if is_adagrad else lr
    words, depth, shards = noise or (lr, 1, 0)
    n, dim = grads.shape
    for index, level in enumerate(levels(n, dim)):
        table, state, ids, grads = launch(
            row_update_kernel.update_rows_kernel,
            *(ids, order, grads, lr, words, table, state),
            outputs=[
                jax.ShapeDtypeStruct(table.shape, table.dtype),
                jax.ShapeDtypeStruct(state.shape, state.dtype),
                jax.ShapeDtypeStruct((2 * level.blocks,), jnp.int32),
                jax.ShapeDtypeStruct((2 * level.blocks, dim), jnp.float32),
            ],
            aliases={5: 0, 6: 1} if is_adagrad else {5: 0},
            **_launch_options(level),
            constants=_constants(level, dim, index)
            | dict(is_adagrad=is_adagrad, eps=eps, depth=depth, shards=shards),
        )
    return table, state


def levels(n: int, dim: int) -> list[Level]:
    """Returns the launches for n entries: the last one is a single program."""
    tile_dim = power_of_two(dim)
    levels: list[Level] = []
    while not levels or levels[-1].blocks > 1:
        values = CONFIG.carried_values if levels else CONFIG.values
        n = 2 * levels[-1].blocks if levels else n
        positions = min(values // tile_dim, power_of_two(n))
        positions = max(positions, CONFIG.min_positions)
        warps = positions * tile_dim // (32 * _VALUES_PER_THREAD)
        levels.append(Level(n, positions, min(max(warps, 1), _MAX_WARPS)))
    return levels


def _launch_options(level: Level) -> dict[str, Any]:
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
