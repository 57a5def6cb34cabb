"""The static side of `fm_lcb_backward`: tuning configs and launch layouts."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.pallas import fm_lcb_layout, tiles, tuned
from loka_jax.pallas.fm_lcb_layout import BF16, TILE_ROWS, Problem, padded, slab_starts
from loka_jax.pallas.tiles import ROWS

_DEPTH = 16  # of a bfloat16 wgmma
_MAX_WARPGROUPS = 4  # that compute
_MAX_STAGES = 4  # of a team's ring buffer, worth trying
_SPARE_REGISTERS = 32  # of a thread, besides accumulators


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """The tunable parameters of a launch.

    Attributes:
        teams: with examples of their own, and a warpgroup for each slab.
        pipeline_stages: examples in flight to each team, in a ring buffer.
    """

    teams: int = 2
    pipeline_stages: int = 2


class Scratch(NamedTuple):
    """Shared memory and barriers.

    A barrier `*_full` completes when that memory is filled, `empty` when it was read.
    """

    x: Any  # [teams * pipeline_stages, n, d]: a ring buffer for each team
    dfm: Any  # [teams * pipeline_stages, n, k]: likewise
    dlcb: Any  # [teams * pipeline_stages, l, d]: likewise
    y: Any  # [n, k]
    w: Any  # [n, l]
    s: Any  # [warpgroups, 64, n]
    gram: Any  # [warpgroups, 64, n]
    dx: Any  # [warpgroups, 64, d]
    full: Any
    empty: Any
    weight_full: Any
    added_full: Any = None  # for each warpgroup, of what is added, in `dx`


class BackwardLayout:
    """How a launch is laid out.

    `n_rows` is n, padded with zeros to at least a slab of 64 rows; `slabs` are the
    first rows of the slabs that cover it, of which the last may overlap the one before.
    """

    def __init__(
        self, problem: Problem, config: BackwardConfig, counts: tuple[int, ...] = ()
    ):
        """Derives the layout; `misfit` tells whether it is possible."""
        self.problem, self.config, self.counts = problem, config, counts
        self.ctas = min(tiles.SMS, problem.batch)
        self.n_rows = padded(problem.n)
        self.slabs = slab_starts(self.n_rows)
        self.warpgroups = config.teams * len(self.slabs)
        self.rest = problem.m - problem.k
        self.most_pieces = max(len(self.pieces(slab)) for slab in self.slabs)

    def scratch(self) -> dict[str, Any]:
        """Returns the fields of `Scratch`."""
        p, n, rest = self.problem, self.n_rows, self.rest
        warpgroups, barrier = self.warpgroups, plgpu.Barrier
        stages = self.config.teams * self.config.pipeline_stages
        added = {}
        if self.counts:
            full = barrier(num_barriers=warpgroups, num_arrivals=self.most_pieces)
            added["added_full"] = full
        return added | dict(
            x=self._operand(stages, n, p.d),
            dfm=self._operand(stages, n, p.k),
            dlcb=self._operand(stages, rest, p.d),
            y=self._operand(n, p.k),
            w=self._operand(n, rest),
            s=self._operand(warpgroups, ROWS, n),
            gram=self._operand(warpgroups, ROWS, n),
            dx=tiles.swizzled((warpgroups, ROWS, p.d), BF16),
            full=barrier(num_barriers=stages, num_arrivals=3),
            empty=barrier(num_barriers=stages, num_arrivals=len(self.slabs)),
            weight_full=barrier(num_arrivals=2),
        )

    def results(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of dX, and of each team's `[dY | dW_L]` by slab."""
        p = self.problem
        partial = self.ctas, self.config.teams, len(self.slabs), ROWS, p.m
        return [
            jax.ShapeDtypeStruct((p.batch, p.n, p.d), BF16),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ]

    def stage(self, team, iteration):
        """Returns the ring buffers' stage of a team's example."""
        stages = self.config.pipeline_stages
        return team * stages + lax.rem(iteration, stages)

    def skipped(self, slab: int) -> int:
        """Returns how many rows of a slab belong to the one before."""
        return -slab % ROWS

    def pieces(self, slab: int) -> list[tuple[int, int, int, int]]:
        """Returns what is added to the rows that a slab stores, piece by piece.

        Each is the number of its array, its first row there and within the slab, and
        how many rows it has.
        """
        begin, end = slab + self.skipped(slab), min(slab + ROWS, self.problem.n)
        pieces, first = [], 0
        for number, count in enumerate(self.counts):
            start, stop = max(begin, first), min(end, first + count)
            if start < stop:
                pieces.append((number, start - first, start - slab, stop - start))
            first += count
        return pieces

    def _operand(self, *shape: int):
        """Returns the type of an operand of `wgmma`; all have the same swizzle."""
        p = self.problem
        columns = math.gcd(self.n_rows, p.d, p.k, self.rest, 64)
        return tiles.swizzled(shape, BF16, columns=columns)


def why_not(problem: Problem) -> str | None:
    """Returns why a problem is not served, or None if it is."""
    p = problem
    for name, size in (("k", p.k), ("l", p.m - p.k)):
        if size <= 0 or size % _DEPTH:
            return f"{name}={size} is not a positive multiple of {_DEPTH}"
    reason = fm_lcb_layout.why_not(problem)
    if reason is None and not search_space(problem):
        sizes = f"n={p.n}, d={p.d} with k + l = {p.m}"
        reason = f"{sizes} do not fit the backward's registers and shared memory"
    return reason


def why_not_added(counts: tuple[int, ...]) -> str | None:
    """Returns why rows of another gradient cannot be added to dX; None if they can."""
    if any(count % TILE_ROWS for count in counts):
        return f"parts of {counts} embeddings are no multiples of {TILE_ROWS}"
    return None


def misfit(problem: Problem, config: BackwardConfig) -> str | None:
    """Returns why a launch cannot be laid out with a config, or None if it can."""
    layout = BackwardLayout(problem, config)
    if layout.warpgroups > _MAX_WARPGROUPS:
        return f"{layout.warpgroups} warpgroups are more than {_MAX_WARPGROUPS}"
    registers = _accumulators(layout) + _SPARE_REGISTERS
    if registers > tiles.consumer_registers(layout.warpgroups):
        return f"it takes {registers} registers"
    size = tiles.shared_memory_bytes(layout.scratch().values())
    if size > tiles.SMEM_BYTES:
        return f"it takes {size} bytes of shared memory of {tiles.SMEM_BYTES}"
    return None


def search_space(problem: Problem) -> list[BackwardConfig]:
    """Returns the configs worth trying that fit, the most promising first."""
    fitting: dict[int, BackwardConfig] = {}
    teams = range(_MAX_WARPGROUPS, 0, -1)
    for pair in itertools.product(teams, range(_MAX_STAGES, 0, -1)):
        config = BackwardConfig(*pair)
        if misfit(problem, config) is None:
            fitting.setdefault(config.teams, config)
    # Without a second stage, loads overlap with other teams' work only.
    return sorted(fitting.values(), key=lambda config: config.pipeline_stages < 2)


def best_config(problem: Problem) -> BackwardConfig:
    """Returns the default config of a launch.

    The fastest one measured for the nearest batch, if it fits; else the first of the
    search space.
    """
    key = fm_lcb_layout.problem_key(problem)
    entry = tuned.lookup("fm_lcb_backward", key, problem.batch)
    if entry is not None:
        config = BackwardConfig(**entry)
        if misfit(problem, config) is None:
            return config
    return search_space(problem)[0]


def _accumulators(layout: BackwardLayout) -> int:
    """Returns the registers of a thread that hold accumulators."""
    p = layout.problem
    return p.m // 2 + max(layout.n_rows, p.d // 2)
