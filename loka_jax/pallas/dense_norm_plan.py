"""The static side of `dense_norm`: problems, settings, and what a launch needs.

What is served and how it is laid out is decided here, on any machine: shared memory is
counted, not tried.
"""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.fp8 import E4M3
from loka_jax.normed import XHAT_MAX_FEATURES, ActivationName, NormName, Outputs
from loka_jax.pallas import tiles, tuned
from loka_jax.pallas.tiles import ROWS

SLAB = 256  # columns of a slab at most; also the block of a block norm
_PART = 256  # columns of x that one TMA copy takes at most
_MAX_SLABS = 8  # CTAs of a portable cluster
# Width in bytes of the pieces of an output, and pieces under way.
_PIECES = ((256, 1), (128, 2), (128, 1), (64, 1))
_MOST_OF_A_KIND = 3  # settings worth trying of as many slabs and teams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch computes, all of it static.

    Attributes:
        m, k, n: rows, contracted size, columns of z.
        dtype: of x and w: E4M3 or bfloat16.
        norm: of the rows of z.
        activation: after it.
        want: the outputs.
        has_bias: a bias is added before the norm.
        has_affine: gamma and beta follow the norm.
        x_scale_by_row: every row of x has a scale of its own.
        w_scale_by_column: every column of z has a scale of its own.
    """

    m: int
    k: int
    n: int
    dtype: Any
    norm: NormName
    activation: ActivationName
    want: Outputs
    has_bias: bool = False
    has_affine: bool = True
    x_scale_by_row: bool = False
    w_scale_by_column: bool = False


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a launch is laid out.

    Attributes:
        teams: warpgroups that work on row tiles of their own.
        stages: parts of x under way to each team (64 rows of at most 256 columns).
        slabs: parts that the columns of z are cut into.
        piece_bytes: width of the pieces in which an output leaves shared memory.
        slots: pieces on their way out for each team.
    """

    teams: int = 2
    stages: int = 2
    slabs: int = 1
    piece_bytes: int = 128
    slots: int = 1


class Inputs(NamedTuple):
    """The kernel's operands, or references to them; None for what is absent."""

    x: Any
    w: Any
    x_scale: Any
    w_scale: Any
    bias: Any
    gamma: Any
    beta: Any
    y_scale: Any


class Results(NamedTuple):
    """What the kernel writes; None for what it does not."""

    y: Any
    y_fp8: Any
    y_scale: Any
    y_amax: Any
    xhat: Any
    rstd: Any


class Scratch(NamedTuple):
    """Shared memory and barriers; None for what is not needed."""

    x: Any  # [teams * stages, 64, part]: a ring for each team
    w: Any  # [parts, columns, part]
    x_scale: Any  # [teams, 2, 64]
    table: Any  # [rows, columns]: what is given for each column
    affine: Any  # [2, columns]: gamma and beta as the activation wants them
    wide: Any  # [teams, slots, 64, columns of a piece], bfloat16 on its way out
    narrow: Any  # the same in E4M3
    rows: Any  # [teams, 3, 64], float32 on its way out
    sums: Any  # [teams, 2, slabs - 1, 64, 8] from the other slabs
    full: Any  # barriers of parts of x that have arrived,
    empty: Any  # and of those that were read
    given: Any  # of the table
    resident: Any  # of w
    prepared: Any  # of `affine`
    turn: Any  # of the team that may use the tensor cores
    sums_full: Any
    scale_full: Any
    scale_empty: Any


class Plan:
    """A launch of some settings for a problem: sizes, outputs, shared memory."""

    def __init__(self, problem: Problem, settings: Settings):
        """Lays a launch out; `misfit` tells whether that is possible."""
        self.m, self.k, self.n = problem.m, problem.k, problem.n
        self.dtype = problem.dtype
        self.norm: NormName = problem.norm
        self.activation: ActivationName = problem.activation
        self.want, self.settings = problem.want, settings
        self.x_scale_by_row = problem.x_scale_by_row
        self.w_scale_by_column = problem.w_scale_by_column
        norm, want = problem.norm, problem.want
        self.columns = self.n // settings.slabs
        self.part = math.gcd(self.k, _PART)
        self.parts = self.k // self.part
        self.steps = self.m // ROWS
        self.groups = max(1, min(tiles.SMS // settings.slabs, self.steps))
        # What is given for each column, in the order of the table's rows.
        by_column = {
            "bias": problem.has_bias,
            "gamma": problem.has_affine,
            "beta": problem.has_affine,
            "w_scale": problem.w_scale_by_column,
        }
        self.table = [name for name, is_given in by_column.items() if is_given]
        self.has_affine = problem.has_affine
        # What a row tile needs of the other slabs: sums, and the amax of its rows.
        needs = (norm in ("layer", "rms"), want.y_fp8 == "rowwise")
        self.exchanges = sum(needs) if settings.slabs > 1 else 0
        # What leaves in FP8 was normalized: half precision is enough after the norm,
        # with fewer instructions and registers.
        in_half = want.y_fp8 is not None and norm != "none"
        self.late_dtype = jnp.float16 if in_half else jnp.float32
        self.writes_wide = bool(want.y) or want.xhat == jnp.bfloat16
        self.writes_narrow = want.y_fp8 is not None or want.xhat == E4M3

    def pieces(self) -> list[int]:
        """Returns the columns of the pieces in which outputs leave."""
        itemsizes = [2] * self.writes_wide + [1] * self.writes_narrow
        return [self.settings.piece_bytes // itemsize for itemsize in itemsizes]

    def shared_memory_bytes(self) -> int:
        """Returns the shared memory that a CTA needs."""
        return tiles.shared_memory_bytes(self.scratch())

    def results(self) -> Results:
        """Returns the shapes of what the kernel writes."""
        m, n, want = self.m, self.n, self.want
        f32, shape = jnp.float32, jax.ShapeDtypeStruct
        blocks = self.settings.slabs if self.norm == "block" else 1
        rstd = shape((m,) if blocks == 1 else (blocks, m), f32)
        return Results(
            y=shape((m, n), jnp.bfloat16) if want.y else None,
            y_fp8=shape((m, n), E4M3) if want.y_fp8 else None,
            y_scale=shape((m,), f32) if want.y_fp8 == "rowwise" else None,
            y_amax=shape((self.settings.slabs, m), f32) if want.y_amax else None,
            xhat=shape((m, n), want.xhat) if want.xhat is not None else None,
            rstd=rstd if want.rstd else None,
        )

    def scratch(self) -> Scratch:
        """Returns the shared memory and the barriers of a CTA."""
        s, want = self.settings, self.want
        f32, barrier, smem = jnp.float32, plgpu.Barrier, plgpu.SMEM
        ring, two_each = s.teams * s.stages, 2 * s.teams

        def staging(dtype):
            piece = s.piece_bytes // jnp.dtype(dtype).itemsize
            return tiles.swizzled((s.teams, s.slots, ROWS, piece), dtype)

        rows = want.y_fp8 == "rowwise" or want.rstd or want.y_amax
        sums = None
        if self.exchanges:
            sums = tiles.swizzled((s.teams, 2, s.slabs - 1, ROWS, 8), f32)
        scales = self.x_scale_by_row
        in_half = self.has_affine and self.late_dtype == jnp.float16
        return Scratch(
            x=tiles.swizzled((ring, ROWS, self.part), self.dtype),
            w=tiles.swizzled((self.parts, self.columns, self.part), self.dtype),
            x_scale=smem((s.teams, 2, ROWS), f32) if scales else None,
            table=smem((len(self.table), self.columns), f32) if self.table else None,
            affine=smem((2, self.columns), jnp.float16) if in_half else None,
            wide=staging(jnp.bfloat16) if self.writes_wide else None,
            narrow=staging(E4M3) if self.writes_narrow else None,
            rows=smem((s.teams, 3, ROWS), f32) if rows else None,
            sums=sums,
            full=barrier(num_barriers=ring),
            empty=barrier(num_barriers=ring),
            given=barrier(num_arrivals=len(self.table)) if self.table else None,
            resident=barrier(num_arrivals=self.parts),
            prepared=barrier() if self.has_affine else None,
            turn=barrier(num_barriers=s.teams) if s.teams > 1 else None,
            sums_full=barrier(num_barriers=two_each, num_arrivals=s.slabs - 1)
            if self.exchanges
            else None,
            scale_full=barrier(num_barriers=two_each) if scales else None,
            scale_empty=barrier(num_barriers=two_each) if scales else None,
        )


def why_not(problem: Problem) -> str | None:
    """Returns why a problem is not served, or None if it is."""
    p = problem
    if p.m == 0 or p.m % ROWS:
        return f"m={p.m} is not a positive multiple of {ROWS}"
    if p.dtype not in (E4M3, jnp.bfloat16):
        return f"{jnp.dtype(p.dtype).name} operands are neither E4M3 nor bfloat16"
    for name, size in (("k", p.k), ("n", p.n)):
        if size == 0 or size % 64:
            return f"{name}={size} is not a positive multiple of 64"
    if p.norm == "block" and p.n > SLAB and p.n % SLAB:
        return f"n={p.n} is not a multiple of the norm's block of {SLAB}"
    if p.norm == "block" and p.has_affine:
        return "block norms have no gamma and beta"
    if p.want.xhat == E4M3 and (p.norm == "none" or p.n > XHAT_MAX_FEATURES):
        return f"rows normalized by {p.norm!r} over n={p.n} may not fit E4M3"
    if not search_space(p):
        return f"a weight of {p.k} x {p.n} does not fit shared memory"
    return None


def search_space(problem: Problem) -> list[Settings]:
    """Returns the settings worth trying that fit, the likeliest first."""
    found = []
    for slabs in _slabs(problem):
        for teams in (4, 2) if problem.n // slabs <= 128 else (2,):
            choices = itertools.product(_stages(problem), _PIECES)
            settings = (Settings(teams, s, slabs, *piece) for s, piece in choices)
            fitting = (s for s in settings if misfit(problem, s) is None)
            found += itertools.islice(fitting, _MOST_OF_A_KIND)
    return found


def best_settings(problem: Problem) -> Settings:
    """Returns the settings that a launch takes by default.

    The best ones measured for the nearest number of rows, if they fit; else the first
    of the search space.
    """
    found = tuned.lookup("dense_norm", problem_key(problem), problem.m)
    if found is not None:
        settings = Settings(**found)
        if misfit(problem, settings) is None:
            return settings
    return search_space(problem)[0]


def problem_key(problem: Problem) -> str:
    """Returns what tells problems apart in the table of measured settings."""
    p, want = problem, problem.want
    outputs = [name for name, on in (("y", want.y), ("xhat", want.xhat)) if on]
    outputs += [f"y_fp8_{want.y_fp8}"] if want.y_fp8 else []
    norm = "over_all" if p.norm in ("layer", "rms") else p.norm
    return f"{jnp.dtype(p.dtype).name} {p.k}x{p.n} {norm} {'+'.join(outputs)}"


def _slabs(problem: Problem) -> list[int]:
    """Returns into how many slabs the columns can be cut, fewest first."""
    if problem.norm == "block" and problem.n > SLAB:
        return [problem.n // SLAB] if problem.n // SLAB <= _MAX_SLABS else []
    counts = (1, 2, 4)
    sizes = {count: problem.n // count for count in counts if problem.n % count == 0}
    return [
        count
        for count, size in sizes.items()
        if size <= SLAB and size % 64 == 0 and (size >= 128 or count == 1)
    ]


def _stages(problem: Problem) -> list[int]:
    """Returns how many parts of x to keep under way: up to three row tiles."""
    parts = problem.k // math.gcd(problem.k, _PART)
    return [parts * tiles_ahead for tiles_ahead in (3, 2, 1)]


def misfit(problem: Problem, settings: Settings) -> str | None:
    """Returns why a launch cannot be laid out so, or None if it can."""
    plan = Plan(problem, settings)
    if problem.n % settings.slabs or plan.columns > SLAB:
        return f"slabs of {problem.n} columns are at most {SLAB} wide"
    # A part is given back when the next one has arrived.
    if plan.parts > 1 and settings.stages < 2:
        return f"x comes in {plan.parts} parts, which takes 2 stages"
    if any(plan.columns % piece for piece in plan.pieces()):
        return f"a slab has {plan.columns} columns, no multiple of a piece's"
    needed = plan.shared_memory_bytes()
    if needed > tiles.SMEM_BYTES:
        return f"it takes {needed} bytes of shared memory of {tiles.SMEM_BYTES}"
    return None


def present(values) -> list:
    """Returns the values that are not None."""
    return [value for value in values if value is not None]
