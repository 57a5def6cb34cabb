"""The choice for a site: the fastest candidate within the limits on errors.

    healthy        relative L2 of a product in E4M3 on Gaussian operands: 0.037
    accurate       every FP8 product within its limits, at its interval's upper end
    harmless       the effects of all FP8 sites on the loss, added up, small at their
                   upper end
    fast           the whole site at least `speedup` times as fast as bfloat16, and
                   `leave_xla` times as fast as XLA's bfloat16 if kernels run it

References:
    LoKA, arXiv 2605.10886, section on Dispatch. The paper's MERE < 0.2 is met by hardly
    any product of zero mean in FP8, so it is no limit here.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, NamedTuple

import tyro

from loka_jax.dispatch.table import Entry, Errors, RoleErrors
from loka_jax.measure.intervals import Interval
from loka_jax.options import require
from loka_jax.recipe import ROLES, GemmRecipe, Recipe, Role, get_recipe
from loka_jax.site import BF16, Choice

# Of products with an operand in E5M2 it is 0.059: too much for gradients, as their
# errors do not average out (docs/recipes.md).
_HEALTHY = 0.037
NOT_MEASURED = "its error was not measured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits within which a candidate is safe, and fast; some are no options.

    Attributes:
        healthy: largest relative L2 error, in multiples of 0.037, that of a product in
            E4M3 on Gaussian operands.
        worst_row: largest relative L2 error of a row, likewise.
        loss: largest relative rise of the loss that FP8 causes, at the upper end of its
            interval: of the effects measured site by site, added up, and in tuning that
            of the whole plan.
        speedup: least speedup of FP8 over the fastest bfloat16.
        leave_xla: least speedup over XLA's bfloat16 of kernels that are not XLA's: a
            site timed alone does not show what XLA fuses with its neighbours.
    """

    healthy: Annotated[float, tyro.conf.Suppress] = 1.5
    worst_row: Annotated[float, tyro.conf.Suppress] = 8.0
    loss: float = 0.0002
    speedup: float = 1.05
    leave_xla: Annotated[float, tyro.conf.Suppress] = 1.08

    def __post_init__(self):  # noqa: D105
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            option = f"limits.{field.name.replace('_', '-')}"
            require(value > 0, option, value, "positive")


DEFAULT_LIMITS = Limits()


class Decision(NamedTuple):
    """The choice for a site, and its reason.

    Attributes:
        speedup: over XLA's bfloat16; None if its time is unknown.
        error: the largest relative L2 of its FP8 products; None if none is in FP8.
        runner_up: the fastest other candidate and why it lost; None without another.
        spread: of a predicted time, the standard deviation of its logarithm; None if
            the time was measured, or is unknown.
    """

    choice: Choice
    reason: str
    speedup: float | None = None
    error: float | None = None
    runner_up: str | None = None
    spread: float | None = None


def why_unsafe(errors: Mapping[str, Interval], limits: Limits) -> str | None:
    """Returns which limit a product's errors break, or None.

    The upper ends of the intervals must be within the limits; NaN never is.
    """
    for name, bound in bounds(limits).items():
        high = errors[name].high
        if not high <= bound:
            return f"{name.replace('_', ' ')} {high:.3g} is above {bound:.3g}"
    return None


def shares_of_limits(
    recipe: Recipe, errors: RoleErrors, limits: Limits, end: str = "high"
) -> dict[Role, float]:
    """Returns by role how far a recipe's errors go towards their limits; 1 is at one.

    The worst measure counts. Products that are not in FP8, or whose errors are not
    known, are left out.

    Args:
        end: "high" or "mean": which value of the intervals counts.
    """
    shares: dict[Role, float] = {}
    largest = bounds(limits)
    for role in ROLES:
        gemm = recipe.gemm(role)
        for name, measures in errors.get(role, {}).items():
            if gemm is not None and get_recipe(name).gemm(role) == gemm:
                values = {x: getattr(measures[x], end) for x in largest}
                shares[role] = max(values[x] / largest[x] for x in largest)
    return shares


def bounds(limits: Limits) -> dict[str, float]:
    """Returns the largest errors that are within the limits, by measure."""
    return {
        "relative_l2": limits.healthy * _HEALTHY,
        "worst_row": limits.worst_row * _HEALTHY,
    }


class Terms(NamedTuple):
    """The terms on which a site is decided.

    Attributes:
        source: of the operands whose errors count. Errors of others are borrowed: they
            make no FP8 safe for training, and in inference the largest counts. If None,
            the errors of all sources count as the site's own, the largest first.
        errors: of the site itself in place of the table's, such as live ones; None for
            the table's.
        roles: the roles that run: all in training, "fwd" alone in inference.
        why_not_fp8: why nothing may be in FP8 here, or None.
        why_not_dlhs: why dlhs may not, or None.
        why_not: why a choice cannot run here, or None.
    """

    source: str | None = None
    errors: RoleErrors | None = None
    roles: tuple[Role, ...] = ROLES
    why_not_fp8: str | None = None
    why_not_dlhs: str | None = None
    why_not: Callable[[Choice], str | None] = lambda choice: None

    @property
    def pass_name(self) -> str:
        """The table's name for the time of these roles."""
        return "training" if self.roles == ROLES else "inference"


_ALL_ROLES = Terms()


def decide(entry: Entry, limits: Limits, terms: Terms = _ALL_ROLES) -> Decision:
    """Returns the decision on a site."""
    times = entry.times.get(terms.pass_name, {})
    if BF16.name not in times:
        return Decision(BF16, "its times are unknown")
    ranked = sorted(map(Choice.parse, times), key=lambda choice: times[choice.name])
    # FP8 must beat the fastest choice in bfloat16, which loses no accuracy.
    bf16 = next(c for c in ranked if not c.is_fp8 and not terms.why_not(c))
    if times[BF16.name] / times[bf16.name] < limits.leave_xla:
        bf16 = BF16
    lost: list[tuple[Choice, str]] = []
    chosen = bf16
    for choice in ranked:
        reason = (
            terms.why_not(choice)
            or why_inaccurate(choice, entry, limits, terms)
            or _why_slow(choice, bf16, times, limits, terms)
        )
        if reason is None:
            chosen = choice
            break
        if choice != bf16:
            lost.append((choice, reason))
    others = [*lost, *((choice, "slower") for choice in ranked if choice != chosen)]
    runner_up = next((f"{choice.name}: {why}" for choice, why in others), None)
    return Decision(
        chosen,
        _reason(chosen, lost),
        speedup=times[BF16.name] / times[chosen.name],
        error=largest_error(chosen, entry, terms),
        runner_up=runner_up,
    )


def accurate(entry: Entry, limits: Limits, terms: Terms = _ALL_ROLES) -> list[Choice]:
    """Returns the measured choices that are accurate enough, whatever their speed."""
    return [
        choice
        for choice in map(Choice.parse, entry.times.get(terms.pass_name, {}))
        if terms.why_not(choice) is None
        and why_inaccurate(choice, entry, limits, terms) is None
    ]


def why_inaccurate(
    choice: Choice, entry: Entry, limits: Limits, terms: Terms
) -> str | None:
    """Returns which limit on errors a candidate breaks, or None."""
    if not _multiplies_in_fp8(choice, terms):
        return None
    why_not = terms.why_not_fp8 or _why_borrowed(entry, terms)
    if why_not is not None:
        return why_not
    for role in terms.roles:
        gemm = choice.recipe.gemm(role)
        if gemm is None:
            continue
        if role == "dlhs" and terms.why_not_dlhs is not None:
            return f"{role}: {terms.why_not_dlhs}"
        errors = _errors_of(entry, terms, role, gemm)
        if not errors:
            return f"{role}: {NOT_MEASURED}"
        for measures in errors:
            reason = why_unsafe(measures, limits)
            if reason is not None:
                return f"{role}: {reason}"
    return None


def largest_error(choice: Choice, entry: Entry, terms: Terms) -> float | None:
    """Returns the largest relative L2 of a choice's FP8 products; None without any."""
    errors = [
        measures["relative_l2"].mean
        for role in terms.roles
        if (gemm := choice.recipe.gemm(role)) is not None
        for measures in _errors_of(entry, terms, role, gemm)
    ]
    return max(errors, default=None)


def _why_slow(choice: Choice, bf16: Choice, times, limits: Limits, terms: Terms):
    """Returns why a candidate is not fast enough, or None."""
    if choice == bf16:
        return None
    if not _multiplies_in_fp8(choice, terms):
        return "not faster than bfloat16 by XLA by enough"
    speedup = times[bf16.name] / times[choice.name]
    if speedup < limits.speedup:
        return f"{speedup:.2f} times {bf16.name}"
    speedup = times[BF16.name] / times[choice.name]
    if choice.provider != "xla" and speedup < limits.leave_xla:
        return f"{speedup:.2f} times {BF16.name}, too little to leave XLA"
    return None


def _multiplies_in_fp8(choice: Choice, terms: Terms) -> bool:
    return any(choice.recipe.gemm(role) for role in terms.roles)


def _why_borrowed(entry: Entry, terms: Terms) -> str | None:
    """Returns why a site's errors, all borrowed, are not enough; None if they are."""
    has_own = terms.errors is not None or terms.source in (None, *entry.errors)
    if has_own or terms.roles != ROLES:
        return None
    if not entry.errors:
        return NOT_MEASURED
    first, *others = entry.errors
    names = f"{first} and {len(others)} more" if others else first
    return f"its errors are borrowed from {names}"


def _errors_of(
    entry: Entry, terms: Terms, role: Role, gemm: GemmRecipe
) -> list[Errors]:
    """Returns the errors of a product with these casts, by each source that counts."""
    by_source = entry.errors
    if terms.errors is not None:
        by_source = {terms.source: terms.errors}
    elif terms.source in entry.errors:
        by_source = {terms.source: entry.errors[terms.source]}
    return [
        measures
        for errors in by_source.values()
        for name, measures in errors.get(role, {}).items()
        if get_recipe(name).gemm(role) == gemm
    ]


def _reason(chosen: Choice, lost: list[tuple[Choice, str]]) -> str:
    if chosen.is_fp8:
        return "the fastest that is accurate enough"
    if chosen == BF16 and not any(not choice.is_fp8 for choice, _ in lost):
        return "nothing else is fast and accurate enough"
    return "no FP8 is fast and accurate enough"


def total_effect(effects: Iterable[Interval]) -> Interval:
    """Returns the sum of independent effects: means add up, half widths in squares."""
    effects = list(effects)
    mean = sum(effect.mean for effect in effects)
    half = math.hypot(*(effect.half for effect in effects))
    return Interval(mean, mean - half, mean + half)


def why_harmful(effect: Interval, limit: float, examples: int | None = None):
    """Returns why a relative rise of the loss is not accepted, or None if it is.

    It is accepted if its upper end is below the limit. If only its mean is, the data
    cannot tell, and more held-out examples would: their number grows with the square of
    the interval over what is left of the limit.

    Args:
        examples: from which it was measured; None if that is not known.
    """
    if effect.high <= limit:
        return None
    rise = "FP8 in the forward products raises the loss by"
    if not effect.mean < limit:
        return f"{rise} {effect.mean:.3%}, above {limit:.2%}"
    up_to = f"{rise} up to {effect.high:.3%}, above {limit:.2%}: the data cannot tell"
    factor = (effect.half / (limit - effect.mean)) ** 2
    if examples is None:
        return f"{up_to}, {factor:,.1f} times as many held-out examples would"
    needed = math.ceil(factor * examples)
    return f"{up_to}, {needed:,} held-out examples would ({examples:,} were used)"
