"""The static side of `fm_lcb`: problems, tuning configs and launch layouts.

Which problems are served, and how a launch is laid out, is decided here without a GPU:
shared memory is counted, not tried.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.pallas import tiles, tuned
from loka_jax.pallas.tiles import ROWS

BF16 = jnp.bfloat16
TILE_ROWS = 8  # of a tile in shared memory
_LEAST_SWIZZLE = 16  # elements: the depth of a bfloat16 wgmma
_MAX_SIDE = tiles.TMA_SIDE
_MAX_STAGES = 32  # barriers in a group, as Mosaic GPU allocates them
_MAX_DEPTH = 6  # of a ring buffer, worth trying
_SPARE_REGISTERS = 24  # of a thread, besides accumulators


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch computes.

    Attributes:
        k: columns of Y, the compression in the factorization machine.
        m: columns of `[Y | W_L]`: k, and one for each linearly compressed embedding.
    """

    batch: int
    n: int
    d: int
    k: int
    m: int


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The tunable parameters of a launch.

    Attributes:
        warpgroups: that compute.
        team: warpgroups that share an example.
        chunks: equal parts of d, one after another.
        pipeline_stages: chunks of x in flight to each team, in a ring buffer.
        fm_parts: equal parts of k in which FM is staged for its store.
    """

    warpgroups: int = 2
    team: int = 1
    chunks: int = 1
    pipeline_stages: int = 3
    fm_parts: int = 1


class Scratch(NamedTuple):
    """Shared memory and barriers; None where not needed.

    A barrier `*_full` completes when that memory is filled, `*_empty` when it was read.
    """

    x: Any  # [teams * pipeline_stages, n, chunk]: a ring buffer for each team
    w: Any  # [n, m]
    p: Any  # [teams, m, chunk]: P^T
    fm: Any  # [warpgroups, 64, k / fm_parts]
    x_full: Any
    x_empty: Any
    w_full: Any
    p_full: Any = None
    p_empty: Any = None


class LaunchLayout:
    """How a launch is laid out: teams, slabs of 64 rows, shared memory.

    `n_rows` and `m_rows` are n and m, padded with zeros to at least a slab. A last slab
    that would reach beyond them overlaps the one before.
    """

    def __init__(self, problem: Problem, config: TuningConfig):
        """Derives the layout; `misfit` tells whether it is possible."""
        self.problem, self.config = problem, config
        self.teams = config.warpgroups // config.team
        self.ctas = min(tiles.SMS, problem.batch)
        self.chunk = problem.d // config.chunks
        self.n_rows, self.m_rows = padded(problem.n), padded(problem.m)
        # All operands of a wgmma have the same swizzle.
        self.swizzle = math.gcd(self.chunk, self.n_rows, self.m_rows, 64)

    def scratch(self) -> dict[str, Any]:
        """Returns the fields of `Scratch` that are needed."""
        config, barrier = self.config, plgpu.Barrier
        teams, team = self.teams, config.team
        stages = teams * config.pipeline_stages
        fm = (config.warpgroups, ROWS, self.problem.k // config.fm_parts)
        fields = dict(
            x=self._operand(stages, self.n_rows, self.chunk),
            w=self._operand(self.n_rows, self.m_rows),
            p=self._operand(teams, self.m_rows, self.chunk),
            fm=_staging(fm),
            x_full=barrier(num_barriers=stages),
            x_empty=barrier(num_barriers=stages, num_arrivals=team),
            w_full=barrier(),
        )
        if team > 1:
            fields["p_full"] = barrier(num_barriers=teams, num_arrivals=team)
            fields["p_empty"] = barrier(num_barriers=teams, num_arrivals=team)
        return fields

    def results(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of FM and LCB."""
        p, shape = self.problem, jax.ShapeDtypeStruct
        return [
            shape((p.batch, p.n, p.k), BF16),
            shape((p.batch, p.m - p.k, p.d), BF16),
        ]

    def stage(self, team, count):
        """Returns the ring buffers' stage of a team's chunk, counted over examples."""
        stages = self.config.pipeline_stages
        return team * stages + lax.rem(count, stages)

    def slabs(self, rows: int, member) -> list:
        """Returns the first rows of the slabs that a member of a team computes."""
        team = self.config.team
        starts = slab_starts(rows)
        if team == 1:
            return starts
        return [ROWS * (i + member) for i in range(0, len(starts), team)]

    def _operand(self, *shape: int):
        """Returns the type of an operand of `wgmma` in shared memory."""
        return tiles.swizzled(shape, BF16, columns=self.swizzle)


def padded(size: int) -> int:
    """Returns n or m as it lies in shared memory."""
    return max(ROWS, -(-size // _LEAST_SWIZZLE) * _LEAST_SWIZZLE)


def slab_starts(rows: int) -> list[int]:
    """Returns the first rows of the slabs of 64 that cover so many rows."""
    return [min(start, rows - ROWS) for start in range(0, rows, ROWS)]


def why_not(problem: Problem) -> str | None:
    """Returns why a problem is not served, or None if it is."""
    p = problem
    if p.batch == 0:
        return "there are no examples"
    for name, size in (("n", p.n), ("k", p.k), ("l", p.m - p.k)):
        if size <= 0 or size % TILE_ROWS:
            return f"{name}={size} is not a positive multiple of {TILE_ROWS}"
    if p.d == 0 or p.d % _LEAST_SWIZZLE:
        return f"d={p.d} is not a positive multiple of {_LEAST_SWIZZLE}"
    for name, size in (("n", p.n), ("k + l", p.m), ("d", p.d)):
        if size > _MAX_SIDE:
            return f"{name}={size} is more than {_MAX_SIDE}"
    if next(_fitting(problem), None) is None:
        sizes = f"n={p.n}, d={p.d} with k + l = {p.m}"
        return f"{sizes} do not fit one warpgroup's registers and shared memory"
    return None


def misfit(problem: Problem, config: TuningConfig) -> str | None:
    """Returns why a launch cannot be laid out with a config, or None if it can."""
    p, team = problem, config.team
    if p.d % (config.chunks * _LEAST_SWIZZLE):
        return f"d={p.d} has no {config.chunks} chunks of multiples of {_LEAST_SWIZZLE}"
    if p.k % (config.fm_parts * TILE_ROWS):
        return f"k={p.k} has no {config.fm_parts} parts of multiples of {TILE_ROWS}"
    layout = LaunchLayout(problem, config)
    sides = (layout.n_rows, layout.m_rows)
    if config.warpgroups % team or any(s % (ROWS * team) for s in sides if team > 1):
        return f"{config} does not divide n={p.n} and k + l = {p.m} among teams"
    if layout.teams * config.pipeline_stages > _MAX_STAGES:
        return f"the ring buffers have at most {_MAX_STAGES} stages"
    registers = _accumulators(layout) + _SPARE_REGISTERS
    # Those of a thread at launch, beyond which the compiler spills.
    if registers > 65536 // (128 * (config.warpgroups + 1)) // 8 * 8:
        return f"it takes {registers} registers"
    size = tiles.shared_memory_bytes(layout.scratch().values())
    if size > tiles.SMEM_BYTES:
        return f"it takes {size} bytes of shared memory of {tiles.SMEM_BYTES}"
    return None


def search_space(problem: Problem) -> list[TuningConfig]:
    """Returns the configs worth trying that fit, the most promising first."""
    deepest: dict[tuple, TuningConfig] = {}
    for config in _fitting(problem):
        deepest.setdefault((config.warpgroups, config.team, config.chunks), config)
    # Chunks make products small; without a second stage loads do not overlap.
    return sorted(deepest.values(), key=lambda c: (c.pipeline_stages < 2, c.chunks))


def best_config(problem: Problem) -> TuningConfig:
    """Returns the default config of a launch.

    The fastest one measured for the nearest batch, if it fits; else the first of the
    search space.
    """
    entry = tuned.lookup("fm_lcb", problem_key(problem), problem.batch)
    if entry is not None:
        config = TuningConfig(**entry)
        if misfit(problem, config) is None:
            return config
    return search_space(problem)[0]


def problem_key(problem: Problem) -> str:
    """Returns the key of a problem, of any batch, in the tuned table."""
    p = problem
    return f"n{p.n} d{p.d} k{p.k} l{p.m - p.k}"


def _fitting(problem: Problem) -> Iterator[TuningConfig]:
    """Yields the configs that fit, those with the deepest ring buffers first.

    None has teams of several warpgroups. Right in the interpreter and for one example a
    CTA, on an H200 they stop at further examples with an illegal instruction; the cause
    is unknown.
    """
    teams = [(4, 1), (3, 1), (2, 1)]
    depths = range(_MAX_DEPTH, 0, -1)
    for pair, chunks, stages, parts in itertools.product(
        teams, (1, 2, 5), depths, (1, 2)
    ):
        config = TuningConfig(*pair, chunks, stages, parts)
        if misfit(problem, config) is None:
            yield config


def _accumulators(layout: LaunchLayout) -> int:
    """Returns the registers of a thread that hold accumulators."""
    slabs = len(slab_starts(layout.n_rows)) // layout.config.team
    fm, product = slabs * layout.problem.k // 2, layout.chunk // 2
    return max(fm, product) if layout.config.chunks == 1 else fm + product


def _staging(shape: tuple[int, ...]):
    """Returns the type of a staging buffer; rows of odd widths need no swizzle."""
    if shape[-1] % _LEAST_SWIZZLE:
        return plgpu.SMEM(shape, BF16)
    return tiles.swizzled(shape, BF16)
