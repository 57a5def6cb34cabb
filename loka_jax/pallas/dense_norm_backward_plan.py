"""The static side of `dense_norm_backward`: problems, settings, needs of a launch.

What is served and how it is laid out is decided here, on any machine: shared memory is
counted, not tried.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from loka_jax.fp8 import E4M3
from loka_jax.normed import XHAT_SCALE_INV, ActivationName, NormName
from loka_jax.pallas import tiles
from loka_jax.pallas.tiles import ROWS

ONES = 8  # columns of the least product: half for each of two sums
_MOST_K, _MOST_N = 512, 256
_AFFINE_NORMS = ("layer", "rms")  # that may have gamma and beta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a launch is laid out.

    Attributes:
        teams: warpgroups that work on row tiles of their own.
        slots: row tiles under way in a CTA, loading, at work or storing.
        slabs: parts the rows of W are cut into, each for CTAs of its own.
        columns: of a tile that are worked on at a time.
        piece: columns of dx that leave at a time.
        pieces: under way for each team.
    """

    teams: int = 2
    slots: int = 2
    slabs: int = 1
    columns: int = 32
    piece: int = 64
    pieces: int = 1


# In order of preference; the first that fits is the default.
_CANDIDATES = (
    *(
        Settings(slots=slots, slabs=slabs, piece=piece)
        for slabs in (1, 2, 4)
        for slots, piece in ((4, 64), (3, 64), (3, 32), (2, 64), (2, 32))
    ),
    Settings(teams=1, slots=1),
    Settings(teams=1, slots=1, piece=32),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What a launch computes, all of it static.

    Attributes:
        m, k, n: rows, columns of dx, columns of dy.
        xhat_dtype: bfloat16 or E4M3.
        w_dtype: bfloat16 or E4M3.
        norm: of the forward pass.
        activation: after it.
        has_affine: gamma and beta followed the norm.
        w_scale_by_row: every row of W has a scale of its own.
    """

    m: int
    k: int
    n: int
    xhat_dtype: DTypeLike
    w_dtype: DTypeLike
    norm: NormName
    activation: ActivationName
    has_affine: bool
    w_scale_by_row: bool = False


class Inputs(NamedTuple):
    """The kernel's operands, or references to them; None for what is absent."""

    dy: Any
    xhat: Any
    w: Any
    w_scale: Any
    rstd: Any
    gamma: Any
    beta: Any
    ones: Any  # [2, ONES, 64]: a product with either sums over rows


class Results(NamedTuple):
    """What the kernel writes, or references to it; None for what it does not."""

    dx: Any
    dz: Any
    dgamma: Any  # [workers, teams, n]: sums by warpgroup
    dbeta: Any


class Scratch(NamedTuple):
    """Shared memory and barriers; None for what is not needed."""

    affine: Any  # [2, n]: gamma, times the scale of xhat, and beta for the slope
    dx: Any  # [teams, pieces, 64, piece] on its way out
    dy: Any  # [slots, parts, 64, side], later du xhat, du and dz
    dz: Any  # [teams, parts, 64, side] in E4M3, if it may not take the place of xhat
    gamma: Any  # [n], times the scale of xhat, in float32
    ones: Any
    w: Any  # [parts, slab, side]
    xhat: Any  # as dy
    empty: Any  # barriers of slots that may be filled,
    full: Any  # and of those that were, for each team
    once: Any  # of all that stays
    prepared: Any  # of `affine` and `gamma`


class Plan:
    """A launch of some settings for a problem: sizes, outputs, shared memory."""

    def __init__(self, problem: Problem, settings: Settings):
        """Lays a launch out; `lay_out` tells whether that is possible."""
        p = problem
        self.m, self.k, self.n = p.m, p.k, p.n
        self.xhat_dtype, self.w_dtype = p.xhat_dtype, p.w_dtype
        self.norm: NormName = p.norm
        self.activation: ActivationName = p.activation
        self.has_affine, self.w_scale_by_row = p.has_affine, p.w_scale_by_row
        self.settings = settings
        # Columns of dy that a TMA copy, or a part of shared memory, holds.
        self.side = math.gcd(self.n, tiles.TMA_SIDE)
        self.parts = self.n // self.side
        self.slab = self.k // settings.slabs
        self.w_rows = math.gcd(self.slab, tiles.TMA_SIDE)  # of a TMA copy
        self.steps = self.m // ROWS
        # CTAs for each slab.
        self.workers = min(self.steps, max(tiles.SMS // settings.slabs, 1))
        is_fp8 = [jnp.dtype(dtype) == E4M3 for dtype in (p.xhat_dtype, p.w_dtype)]
        self.xhat_scale = XHAT_SCALE_INV if is_fp8[0] else 1.0
        self.multiplies_fp8 = is_fp8[1]
        self.quantizes_in_place = all(is_fp8)
        # What was normalized is in float16's range, unlike z.
        self.slope_dtype = jnp.float32 if p.norm == "none" else jnp.float16

    def results(self) -> Results:
        """Returns the shapes of what the kernel writes."""
        shape = jax.ShapeDtypeStruct
        sums = None
        if self.has_affine:
            sums = shape((self.workers, self.settings.teams, self.n), jnp.float32)
        return Results(
            dx=shape((self.m, self.k), jnp.bfloat16),
            dz=shape((self.m, self.n), jnp.bfloat16),
            dgamma=sums,
            dbeta=sums,
        )

    def scratch(self) -> Scratch:
        """Returns the shared memory and the barriers of a CTA."""
        s, barrier, smem = self.settings, plgpu.Barrier, plgpu.SMEM
        tile = (self.parts, ROWS, self.side)
        needs_dz = self.multiplies_fp8 and not self.quantizes_in_place
        affine, gamma, ones, prepared = None, None, None, None
        if self.has_affine:
            affine = smem((2, self.n), self.slope_dtype)
            gamma = smem((self.n,), jnp.float32)
            ones = tiles.swizzled((2, ONES, ROWS), jnp.bfloat16)
            prepared = barrier()
        copies_once = self.parts * (self.slab // self.w_rows) + self.has_affine
        return Scratch(
            affine=affine,
            dx=tiles.swizzled((s.teams, s.pieces, ROWS, s.piece), jnp.bfloat16),
            dy=tiles.swizzled((s.slots, *tile), jnp.bfloat16),
            dz=tiles.swizzled((s.teams, *tile), E4M3) if needs_dz else None,
            gamma=gamma,
            ones=ones,
            w=tiles.swizzled((self.parts, self.slab, self.side), self.w_dtype),
            xhat=tiles.swizzled((s.slots, *tile), self.xhat_dtype),
            empty=barrier(num_barriers=s.slots),
            # A barrier's phase is counted by each thread that waits on it: one for
            # every pair of a team and a slot.
            full=barrier(num_barriers=s.teams * s.slots, num_arrivals=2 * self.parts),
            once=barrier(num_arrivals=copies_once),
            prepared=prepared,
        )


def why_not(
    m: int,
    k: int,
    n: int,
    *,
    xhat_dtype: DTypeLike,
    w_dtype: DTypeLike,
    norm: NormName,
    activation: ActivationName,
    settings: Settings | None = None,
) -> str | None:
    """Returns why the kernel does not serve a shape, or None if it does."""
    problem = Problem(
        m=m,
        k=k,
        n=n,
        xhat_dtype=xhat_dtype,
        w_dtype=w_dtype,
        norm=norm,
        activation=activation,
        has_affine=norm in _AFFINE_NORMS,
    )
    plan = lay_out(problem, settings)
    return plan if isinstance(plan, str) else None


def lay_out(problem: Problem, settings: Settings | None = None) -> Plan | str:
    """Returns the layout of a launch, or why there is none.

    Without settings it is the first of the candidates that fits.
    """
    reason = _unserved(problem)
    if reason is not None:
        return reason
    if settings is not None:
        return _misfit(problem, settings) or Plan(problem, settings)
    for candidate in _CANDIDATES:
        if _misfit(problem, candidate) is None:
            return Plan(problem, candidate)
    return f"k={problem.k} x n={problem.n} needs more shared memory than a CTA has"


def _unserved(problem: Problem) -> str | None:
    """Returns why no layout serves a problem, or None if one may."""
    p = problem
    if p.m == 0 or p.m % ROWS:
        return f"m={p.m} is not a positive multiple of {ROWS}"
    for name, size, most in (("k", p.k, _MOST_K), ("n", p.n, _MOST_N)):
        if size == 0 or size % 64 or size > most:
            return f"{name}={size} is not a multiple of 64 up to {most}"
    for name, dtype in (("xhat", p.xhat_dtype), ("w", p.w_dtype)):
        if jnp.dtype(dtype) not in (jnp.dtype(E4M3), jnp.dtype(jnp.bfloat16)):
            return f"{name} is {jnp.dtype(dtype).name}, neither bfloat16 nor E4M3"
    if p.norm == "none" and jnp.dtype(p.xhat_dtype) == E4M3:
        return "without a norm xhat is in bfloat16"
    return None


def _misfit(problem: Problem, settings: Settings) -> str | None:
    """Returns why a launch cannot be laid out so, or None if it can."""
    k, slabs = problem.k, settings.slabs
    if k % (64 * slabs):
        return f"{k=} is not a multiple of 64 for each of {slabs} slabs"
    # `why_not` cannot know whether these norms have gamma and beta: room is for both.
    if problem.norm in _AFFINE_NORMS:
        problem = dataclasses.replace(problem, has_affine=True)
    used = tiles.shared_memory_bytes(Plan(problem, settings).scratch())
    if used > tiles.SMEM_BYTES:
        return f"shared memory of {used} bytes exceeds {tiles.SMEM_BYTES}"
    return None
