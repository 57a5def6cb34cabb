"""When the operands of an FP8 site have left what they were, and when they are back.

For a product under the casts of its role, with the scales of the step:

    error     how far its relative L2 error is above its limit (`policy.Limits`), as
              log2 of the ratio; 0 within the limit

For an operand `[rows, columns]` under every cast that the recipe gives it:

    flushed   the share of its magnitude that a row, or a column, loses to zeros:
              the mean over rows or over columns, whichever is larger
    level     log2 of the size of its elements
    peak      log2 of the size of its largest column

A size is `(mean sqrt|x|)^2`, which a few outliers hardly move. Errors hide what is
small: beside one loud column a product loses next to nothing, and all other columns
everything. So rows and columns that are lost count alike, however small they are.

Each measure is compared with its usual value.

    off    a measure is farther from its usual value than its tolerance
    home   all are within three quarters of it

Errors and losses are the harm, and their usual values stay. Sizes do none: scales
follow them. They tell operands that explode or vanish before these do harm, and no
other growth: training moves operands, too, by a power of the time rather than
exponentially. So their usual values follow them, at a limited pace a step; and at once
where a size jumps from one look to the next by up to 64 times, as at the first batch of
a day. Two jumps in a row are growth.

A site that was off in `LOOKS` looks in a row has drifted. It is then looked at with the
casts that it had, and returns once it was home in enough looks in a row: twice as many
after each time.

An error above its limit, but not off, stays in FP8: a site whose errors were above in
`LONG` more looks than they were not is told of, once.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax import fp8, quality
from loka_jax.dispatch.policy import DEFAULT_LIMITS, Limits, bounds
from loka_jax.fp8 import Fp8Array
from loka_jax.ops.device import local_device
from loka_jax.ops.group_sites import unit_of_fp8
from loka_jax.ops.plan import resolve
from loka_jax.probe.live_errors import quantized
from loka_jax.probe.operands import Operands, blocks
from loka_jax.recipe import OPERANDS, ROLE_OPERANDS, ROLES, Recipe, Role
from loka_jax.site import Choice, SiteSpec

_ROWS = 256  # of a product in FP8 that are computed
SETTLING = 4  # first looks of a site, in which training itself moves the most
LOOKS = 3  # looks in a row that are off, and are drift; a single batch proves nothing
HOME = 0.75  # share of a tolerance within which a measure is home
HOME_LOOKS = 4  # looks in a row at home before the first return
LONG = 8  # looks above a limit on errors after which that is said
_JUMP, _LARGEST_JUMP = 1.5, 6.0  # of a size, as log2: noise of a batch is below
_MAX_DOUBLINGS = 8


class Rule(NamedTuple):
    """What a measure may do.

    Attributes:
        rise, fall: distances from its usual value beyond which it is off.
        pace: how far its usual value follows it in a training step.
        text: a clause on a measure that is off.
    """

    rise: float
    fall: float
    pace: float
    text: str


# Growth of 1.05 a step, 2^0.07, is off after 45 steps. The largest that was seen in
# healthy training is 74 times in 770 steps, 2^0.008 a step: a column of
# `fp8_mlperf_dcnv2` in bfloat16, at batches of 8,192 rows. Gradients shrink as a model
# learns, so that a fall counts from 1/64 on.
_SIZES = 2.7, 6.0, 0.01
# An error twice its limit, or twice what it was if that was above. A tenth of all rows
# or columns lost is above what any limit on errors allows.
_ERRORS, _LOSSES = (1.0, math.inf, 0.0), (0.1, math.inf, 0.0)
RULES = {
    "error": Rule(*_ERRORS, "the error of its {name} is {factor:.3g} times its limit"),
    "flushed": Rule(*_LOSSES, "rows or columns of {name} lose {value:.0%} to zeros"),
    "level": Rule(*_SIZES, "{name} is {times:.3g} times its usual size"),
    "peak": Rule(
        *_SIZES, "the largest column of {name} is {times:.3g} times its usual size"
    ),
}
_ERROR = list(RULES).index("error")
_RISE, _FALL, _PACE = (np.array([rule[i] for rule in RULES.values()]) for i in range(3))

# float32 [3, measures], of the three products or operands; NaN where there is none.
type Measures = np.ndarray


def health(
    operands: Operands,
    errors: Float[Array, "3"],
    recipe: Recipe,
    *,
    fp8_results: Collection[Role] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> Float[Array, "3 4"]:
    """Returns the measures in `RULES` of fwd, dlhs, drhs and of lhs, rhs, g.

    NaN for products and operands without a cast, and for the size of zeros.

    Args:
        operands: some rows of those of a step.
        errors: relative L2 of the products by role.
        fp8_results: roles whose products leave in FP8 without a scale of their own if
            they run in FP8, see `Site.fp8_results`: the error has what saturates
            there, too.
    """
    (m, k), n = operands.lhs.shape, operands.rhs.shape[1]
    site = resolve(SiteSpec(m=m, k=k, n=n), Choice("xla", recipe), local_device())
    recipe = site.recipe  # without what cannot run in FP8
    largest, nothing = bounds(limits)["relative_l2"], jnp.full((), jnp.nan, jnp.float32)
    excess, flushed = [], {name: [] for name in OPERANDS}
    for role, error in zip(ROLES, errors, strict=True):
        if recipe.gemm(role) is None:
            excess.append(nothing)
            continue
        arrays = blocks(operands, role)
        views = quantized(operands, role, recipe, *arrays)
        for name, x, view in zip(ROLE_OPERANDS[role], arrays, views, strict=True):
            flushed[name].append(_flushed(x, view.dequantize()))
        if role in fp8_results:
            error = jnp.hypot(error, _rounding(role, *views))
        excess.append(jnp.log2(jnp.maximum(error / largest, 1.0)))
    rows = []
    for name, error in zip(OPERANDS, excess, strict=True):
        roots = jnp.mean(jnp.sqrt(jnp.abs(getattr(operands, name))), axis=0)
        lost = jnp.max(jnp.stack(flushed[name] or [nothing]))
        sizes = 2 * jnp.log2(jnp.stack([jnp.mean(roots), jnp.max(roots)]))
        sizes = jnp.where(jnp.isnan(lost), jnp.nan, sizes)
        rows.append(jnp.stack([error, lost, *sizes]))
    measures = jnp.stack(rows)
    return jnp.where(jnp.isfinite(measures), measures, jnp.nan)


def _rounding(role: Role, first: Fp8Array, second: Fp8Array) -> Float[Array, ""]:
    """Returns the relative L2 error of a product that leaves in the first's format."""
    rows, k = first.data[:_ROWS].astype(jnp.float32), first.data.shape[1]
    product = jnp.dot(
        rows, second.data.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST
    )
    scaled = product / unit_of_fp8(role, k)
    return quality.relative_l2(scaled, fp8.saturate(scaled, first.data.dtype))


def _flushed(x: Float[Array, "r c"], left: Float[Array, "r c"]) -> Float[Array, ""]:
    """Returns what a cast that makes `left` of an operand loses to zeros.

    The share of its magnitude that a column, or a row, loses, the mean of all.
    """
    sizes, means = jnp.abs(x), []
    for axis in (0, 1):
        totals = jnp.sum(sizes, axis)
        lost = jnp.sum(jnp.where(left == 0, sizes, 0.0), axis)
        count = jnp.sum(totals > 0, dtype=jnp.float32)
        shares = lost / jnp.where(totals > 0, totals, 1.0)
        means.append(jnp.sum(shares) / jnp.maximum(count, 1))
    return jnp.maximum(*means)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteDrift:
    """What the looks at a site have shown.

    Attributes:
        usual: usual measures, as in `Measures`; None where there are none.
        before: those of the newest look, None where a jump was followed.
        off: looks in a row at which a measure was off.
        home: looks in a row at which all were home.
        why: what was off at the newest look at which anything was.
        left: the decision on the site before it was demoted for it, as JSON values.
        above: looks at which an error was above its limit, less those at which none
            was; it stays at `LONG`.
    """

    looks: int = 0
    usual: list[list[float | None]] | None = None
    off: int = 0
    home: int = 0
    why: str = ""
    left: dict[str, Any] | None = None
    demotions: int = 0
    before: list[list[float | None]] | None = None
    above: int = 0

    def after(self, measures: Measures, steps: int) -> "SiteDrift":
        """Returns what is known after a look, so many training steps after the last.

        It is the same if the look is not finite.
        """
        known = np.isfinite(measures)
        if not np.any(known):
            return self
        usual, has_jumped = measures, np.zeros_like(known)
        if self.usual is not None and self.looks >= SETTLING:
            usual = np.array(self.usual, np.float64)
            usual = np.where(np.isfinite(usual), usual, measures)
            move = measures - np.array(self.before, np.float64)  # NaN where unknown
            has_jumped = (np.abs(move) > _JUMP) & (np.abs(move) <= _LARGEST_JUMP)
            has_jumped &= (_PACE > 0) & (_excess(measures - usual) > 1)
            usual += np.where(has_jumped, move, 0.0)
            pace = steps * _PACE
            usual += np.where(known, np.clip(measures - usual, -pace, pace), 0.0)
        change = np.where(known, measures - usual, 0.0)
        excess = _excess(change)
        is_off = np.max(excess) > 1
        why = _describe(excess, measures, change) if is_off else self.why
        is_above = np.nanmax(np.append(measures[:, _ERROR], 0.0)) > 0
        above = min(max(self.above + (1 if is_above else -1), 0), LONG)
        return dataclasses.replace(
            self,
            looks=self.looks + 1,
            usual=_as_json(usual),
            before=_as_json(np.where(has_jumped, np.nan, measures)),
            off=self.off + 1 if is_off else 0,
            home=self.home + 1 if np.max(excess) <= HOME else 0,
            why=why,
            above=LONG if self.above == LONG else above,
        )

    @property
    def is_long_above(self) -> bool:
        """True if an error of a site in FP8 has long been above its limit."""
        return self.above == LONG and self.left is None

    @property
    def has_drifted(self) -> bool:
        """True if the site is to be demoted."""
        return self.left is None and self.off >= LOOKS

    @property
    def is_back(self) -> bool:
        """True if a demoted site is to return."""
        doublings = min(self.demotions - 1, _MAX_DOUBLINGS)
        return self.left is not None and self.home >= HOME_LOOKS * 2**doublings


def _excess(change: Measures) -> Measures:
    """Returns how far changes go towards their tolerances; above 1 is off."""
    return np.maximum(change / _RISE, -change / _FALL)


def _as_json(measures: Measures) -> list[list[float | None]]:
    return [[None if np.isnan(x) else float(x) for x in row] for row in measures]


def _describe(excess: Measures, measures: Measures, change: Measures) -> str:
    """Returns a clause on what is off most."""
    place = np.unravel_index(np.argmax(excess), excess.shape)
    measure, rule = list(RULES.items())[place[1]]
    names = ROLES if measure == "error" else OPERANDS
    return rule.text.format(
        name=names[place[0]],
        value=measures[place],
        factor=2.0 ** float(measures[place]),
        times=2.0 ** float(change[place]),
    )


def after_change(
    sites: Mapping[str, SiteDrift], demoted: Mapping[str, Any], returned: Iterable[str]
) -> dict[str, SiteDrift]:
    """Returns what is known of sites after some were demoted, and others returned.

    `demoted` has what their decisions were, as JSON values.
    """
    after = dict(sites)
    for path, decision in demoted.items():
        site = after.get(path, SiteDrift())
        after[path] = dataclasses.replace(
            site, left=decision, home=0, demotions=site.demotions + 1
        )
    for path in returned:
        after[path] = dataclasses.replace(after[path], left=None, off=0, above=0)
    return after
