"""The static side of `jagged_attention`: problems, tuning configs, launch layouts.

Which problems are served, and how a launch is laid out, is decided here without a GPU:
shared memory is counted, not tried.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax import jagged
from loka_jax.fp8 import E4M3
from loka_jax.jagged import FORWARD, Pass, Visibility
from loka_jax.pallas import tiles
from loka_jax.pallas.tiles import ROWS

BF16 = jnp.bfloat16
SIZES = (64, 128, 256)  # of heads
_SPARE_REGISTERS = 40  # of a thread, besides accumulators
_MOST_RANKED = 1024  # tiles: a sort and a gather take longer than n^2 comparisons


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch computes.

    Attributes:
        size: of a head in q and k.
        value_size: of a head in v.
        dtype: of the operands, bfloat16 or E4M3.
    """

    heads: int
    size: int
    value_size: int
    dtype: Any = BF16


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The tunable parameters of a launch.

    Attributes:
        warpgroups: that compute, each for 64 fixed rows.
        block: streamed rows at a time.
        fixed_stages: tiles of fixed rows in shared memory.
        x_stages: blocks of x in flight, in a ring buffer; likewise `y_stages`.
        takes_turns: whether two warpgroups alternate between products and the rest.
        overlaps: whether scores are begun before the sums' products have ended.
    """

    warpgroups: int = 2
    block: int = 128
    fixed_stages: int = 1
    x_stages: int = 2
    y_stages: int = 2
    takes_turns: bool = True
    overlaps: bool = True


class Scratch(NamedTuple):
    """Shared memory and barriers; None where not needed.

    A barrier `*_full` completes when that memory is filled, `*_empty` when it was read.
    """

    a: Any  # [fixed_stages * warpgroups, 64, size]
    x: Any  # [x_stages, block, size]
    y: Any  # [y_stages, block, size]; [y_stages, size, block] in FP8
    fixed_full: Any
    fixed_empty: Any
    x_full: Any
    x_empty: Any
    y_full: Any
    y_empty: Any
    b: Any = None  # as a
    out: Any = None  # [warpgroups, 64, size], where a result does not fit in a
    turn: Any = None
    weights: Any = None  # [warpgroups, 64, block]; for the interpreter
    lse: Any = None  # [warpgroups, 64], of the forward pass of a softmax
    of_queries: Any = None  # [x_stages, 2, block], lse and delta beside x


class LaunchLayout(NamedTuple):
    """How a launch is laid out. Static under jit.

    Attributes:
        rows: C; of a softmax the fixed ones, as there may be others that stream.
        scale: factor of the scores.
        max_length: N; of a softmax any.
        is_softmax: weights are a softmax of the scores.
    """

    kind: Pass
    rows: int
    heads: int
    size: int
    scale: float
    max_length: int
    config: TuningConfig
    is_interpreted: bool
    dtype: Any = BF16
    is_softmax: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether the operands are in FP8."""
        return self.dtype == E4M3

    @property
    def tile(self) -> int:
        """Fixed rows of a CTA at a time."""
        return ROWS * self.config.warpgroups

    @property
    def unit(self) -> int:
        """Rows of whole tiles and blocks."""
        return math.lcm(self.tile, self.config.block)

    @property
    def items(self) -> int:
        """Tiles of all heads, of rows that are in whole tiles."""
        return self.rows // self.tile * self.heads

    @property
    def ctas(self) -> int:
        """CTAs, each of which takes one item after another."""
        return min(tiles.SMS, self.items)

    @property
    def takes_turns(self) -> bool:
        """Whether the warpgroups alternate."""
        return self.config.takes_turns and self.config.warpgroups == 2

    @property
    def has_of_queries(self) -> bool:
        """Whether a launch takes lse and delta of the queries."""
        return self.is_softmax and self.kind != FORWARD

    def factors(self) -> list[float]:
        """Returns the factors of slopes, whose sums silu has doubled, and of values."""
        own = self.scale / (2 * self.max_length), 1 / self.max_length
        slopes, values = (self.scale, 1.0) if self.is_softmax else own
        return [slopes] * self.kind.has_slopes + [values] * self.kind.has_values

    def scratch(self) -> dict[str, Any]:
        """Returns the fields of `Scratch` that are needed."""
        config, barrier = self.config, plgpu.Barrier
        warpgroups, stages = config.warpgroups, config.fixed_stages
        operand = functools.partial(_operand, self.dtype)
        fixed = operand(stages * warpgroups, ROWS, self.size)
        streamed = config.block, self.size
        copies = warpgroups * (1 + self.kind.has_slopes)
        is_beside_x = self.has_of_queries and self.kind.by_key
        empty: dict[str, Any] = dict(num_arrivals=warpgroups)
        fields = dict(
            a=fixed,
            x=operand(config.x_stages, *streamed),
            y=operand(config.y_stages, *streamed[:: -1 if self.is_fp8 else 1]),
            fixed_full=barrier(num_barriers=stages, num_arrivals=copies),
            fixed_empty=barrier(num_barriers=stages, **empty),
            x_full=barrier(num_barriers=config.x_stages, num_arrivals=1 + is_beside_x),
            x_empty=barrier(num_barriers=config.x_stages, **empty),
            y_full=barrier(num_barriers=config.y_stages),
            y_empty=barrier(num_barriers=config.y_stages, **empty),
        )
        if self.kind.has_slopes:
            fields["b"] = fixed
        if self.is_fp8:
            fields["out"] = _operand(BF16, warpgroups, ROWS, self.size)
        if self.takes_turns:
            fields["turn"] = barrier(**empty)
        if self.is_interpreted:
            fields["weights"] = operand(warpgroups, ROWS, config.block)
        if self.is_softmax and self.kind == FORWARD:
            fields["lse"] = plgpu.SMEM((warpgroups, ROWS), jnp.float32)
        if is_beside_x:
            shape = config.x_stages, 2, config.block
            fields["of_queries"] = plgpu.SMEM(shape, jnp.float32)
        return fields


def task_table(layout: LaunchLayout, visible: Visibility) -> jax.Array:
    """Returns what a `Task` has besides its head, of all tiles, the most work first."""
    visits = jagged.blocks(
        visible,
        by_key=layout.kind.by_key,
        fixed=layout.tile,
        streamed=layout.config.block,
    )
    count = len(visits.count)
    tile = jnp.arange(count, dtype=jnp.int32)
    table = jnp.stack([tile, *visits], axis=1)
    if count > _MOST_RANKED:
        return table[jnp.argsort(-visits.count, stable=True)]
    key = visits.count * count - tile  # distinct
    place = jnp.sum(jnp.where(key[None] > key[:, None], 1, 0), axis=1)
    is_there = place[:, None] == tile[None]
    return jnp.sum(jnp.where(is_there[..., None], table[:, None], 0), axis=0)


class Task(NamedTuple):
    """A tile of a head, and the blocks that it visits."""

    head: Any
    tile: Any
    second: Any
    second_count: Any
    first: Any
    count: Any
    full_first: Any
    full_last: Any

    def block(self, step):
        """Returns the block visited at a step."""
        is_second = step < self.second_count
        return step + jnp.where(is_second, self.second, self.first - self.second_count)

    def is_full(self, block):
        """Returns whether all see all of a block."""
        return (block >= self.full_first) & (block < self.full_last)


def served_size(*sizes: int) -> int:
    """Returns the least size served that holds heads of these, or theirs if none."""
    return min((x for x in SIZES if x >= max(sizes)), default=max(sizes))


def widened(*operands: jax.Array) -> list[jax.Array]:
    """Returns heads [C, h, d] of a size that is served, with columns of zeros."""
    sizes = [x.shape[2] for x in operands]
    each = zip(operands, (served_size(*sizes) - x for x in sizes), strict=True)
    return [jnp.pad(x, ((0, 0), (0, 0), (0, more))) if more else x for x, more in each]


def why_not(problem: Problem) -> str | None:
    """Returns why a problem is not served, or None if it is."""
    p = problem
    if p.size != p.value_size:
        return f"heads of size {p.size} in q and k, and {p.value_size} in v"
    if p.size not in SIZES:
        return f"heads of size {p.size}, not {', '.join(map(str, SIZES))}"
    if p.dtype not in (BF16, E4M3):
        return f"operands in {jnp.dtype(p.dtype)}"
    return None


def misfit(layout: LaunchLayout) -> str | None:
    """Returns why a launch cannot be laid out, or None if it can."""
    config = layout.config
    if layout.is_fp8 and layout.kind != FORWARD:
        return "only the forward pass takes operands in FP8"
    if config.block % ROWS or config.block > tiles.TMA_SIDE:
        return f"a block of {config.block} is no multiple of {ROWS} up to 256"
    if layout.kind.has_slopes and _least_stages(layout) < 2:
        return "a block is read until the scores of the next: it takes two stages"
    scratch = layout._replace(is_interpreted=False).scratch()
    size = tiles.shared_memory_bytes(scratch.values())
    if size > tiles.SMEM_BYTES:
        return f"it takes {size} bytes of shared memory of {tiles.SMEM_BYTES}"
    return None


def _least_stages(layout: LaunchLayout) -> int:
    """Returns the stages of the rings that products of sums read."""
    config, has_values = layout.config, layout.kind.has_values
    return min(config.x_stages, config.y_stages if has_values else config.x_stages)


def search_space(kind: Pass, size: int, dtype: Any = BF16) -> list[TuningConfig]:
    """Returns the configs worth trying, the default first."""
    shapes = [(2, 64), (2, 128)]
    if size == 64 or (size == 128 and dtype == E4M3):
        shapes += [(3, 64), (3, 128), (2, 256)]
    elif kind.has_slopes or (size > 128 and dtype == BF16):
        shapes = shapes[:1]
    default = best_config(kind, size, dtype)
    configs = [default]
    for shape, turns, overlaps in itertools.product(
        shapes, (True, False), (True, False)
    ):
        if turns and shape[0] != 2:
            continue
        for stages in ((2, 4, 4), (1, 3, 3), (2, 2, 2), (1, 2, 2), (1, 2, 1)):
            config = TuningConfig(*shape, *stages, turns, overlaps)
            if _is_served(kind, size, config, dtype):
                configs.append(config)
                break
    return list(dict.fromkeys(configs))


def _is_served(kind: Pass, size: int, config: TuningConfig, dtype: Any) -> bool:
    """Returns whether a config fits, as ptxas does: weights share registers."""
    results = kind.has_slopes + kind.has_values
    registers = size // 2 * results + config.block // 2 * (1 + kind.has_slopes)
    weights = config.block * results * jnp.dtype(dtype).itemsize // 8
    registers += weights * config.overlaps + _SPARE_REGISTERS
    if registers > tiles.consumer_registers(config.warpgroups):
        return False
    return misfit(LaunchLayout(kind, 1, 1, size, 1.0, 1, config, False, dtype)) is None


def best_config(kind: Pass, size: int, dtype: Any = BF16) -> TuningConfig:
    """Returns the default config of a launch.

    Where scores and sums leave few registers, their products do not overlap: ptxas
    would serialize all.
    """
    if dtype == E4M3:
        return {
            64: TuningConfig(2, 128, 2, 4, 4),
            128: TuningConfig(2, 128, 2, 4, 4),
            256: TuningConfig(2, 128, 1, 2, 2),
        }[size]
    if not kind.has_slopes:
        return {
            64: TuningConfig(2, 128, 2, 4, 4),
            128: TuningConfig(2, 128, 1, 3, 3),
            256: TuningConfig(2, 64, 1, 2, 2),
        }[size]
    return {
        64: TuningConfig(2, 64, 2, 4, 4),
        128: TuningConfig(2, 64, 1, 3, 3, overlaps=not kind.has_values),
        256: TuningConfig(2, 64, 1, 2, 1, overlaps=False),
    }[size]


def _operand(dtype: Any, *shape: int):
    """Returns the type of an operand of `wgmma` in shared memory."""
    columns = min(shape[-1], 128 // jnp.dtype(dtype).itemsize)
    return tiles.swizzled(shape, dtype, columns=columns)
