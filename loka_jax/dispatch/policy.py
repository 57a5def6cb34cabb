"""Who runs a site: the fastest candidate within the limits on errors.

    healthy(role)  relative L2 of the role's formats on Gaussian operands:
                   0.037 with E4M3 twice, 0.059 with E5M2 and E4M3
    accurate       every FP8 product within its limits, at its interval's upper end
    harmless       the effects of all FP8 sites on the loss, lower ends added up, small
    fast           the whole site at least `speedup` times as fast as bfloat16, and
                   `leave_xla` times as XLA's if kernels run it

References:
    LoKA, arXiv 2605.10886, section on Dispatch. The paper's MERE < 0.2 is met by hardly
    any product of zero mean in FP8, so it is a limit to ask for, not the default.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from loka_jax.dispatch.candidates import BF16
from loka_jax.dispatch.table import Entry, Errors, RoleErrors
from loka_jax.fp8 import E5M2
from loka_jax.options import require
from loka_jax.recipe import ROLES, GemmRecipe, Role, get_recipe
from loka_jax.site import Choice

# Relative L2 of products of Gaussian operands, by whether one of them is in E5M2.
_HEALTHY = {False: 0.037, True: 0.059}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When a candidate is safe, and when it is fast.

    Attributes:
        healthy: relative L2 error at most, in multiples of what its formats give on
            Gaussian operands: 0.037 with E4M3 twice, 0.059 with E5M2 and E4M3.
        worst_row: relative L2 error at most of a row, likewise.
        mere: mean element-wise relative error at most; None for no such limit. The
            paper names 0.2, which hardly any product of zero mean meets in FP8.
        loss: relative rise of the loss at most that FP8 is known to cause: by what
            Probe measured site by site, the lower ends of the intervals added up.
        speedup: of FP8 over the fastest bfloat16 at least.
        leave_xla: over XLA's bfloat16 at least, for other kernels than XLA's: what XLA
            fuses with a site's neighbours does not show in the time of a site alone.
    """

    healthy: float = 1.5
    worst_row: float = 8.0
    mere: float | None = None
    loss: float = 0.0002
    speedup: float = 1.05
    leave_xla: float = 1.08

    def __post_init__(self):  # noqa: D105
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            option = f"limits.{field.name.replace('_', '-')}"
            require(value is None or value > 0, option, value, "positive")


DEFAULT_LIMITS = Limits()


class Decision(NamedTuple):
    """What a site runs, and why.

    Attributes:
        choice: what runs.
        reason: why that.
        speedup: over XLA's bfloat16; None if not measured.
        error: the largest relative L2 of its FP8 products; None if none is in FP8.
        runner_up: the fastest other candidate, and why it lost; None if alone.
    """

    choice: Choice
    reason: str
    speedup: float | None = None
    error: float | None = None
    runner_up: str | None = None


def healthy(gemm: GemmRecipe) -> float:
    """Returns the relative L2 error of a product's formats on Gaussian operands."""
    formats = {jnp.dtype(cast.dtype) for cast in (gemm.first, gemm.second)}
    return _HEALTHY[jnp.dtype(E5M2) in formats]


def why_unsafe(errors: Errors, unit: float, limits: Limits) -> str | None:
    """Returns which limit a product's errors break, or None.

    Args:
        errors: with intervals, whose upper ends must hold; NaN is below no limit.
        unit: the healthy relative L2 error of its formats.
        limits: to keep.
    """
    bounds = {
        "relative_l2": limits.healthy * unit,
        "worst_row": limits.worst_row * unit,
        "mere": limits.mere,
    }
    for name, bound in bounds.items():
        high = errors[name].high
        if bound is not None and not high <= bound:
            return f"{name.replace('_', ' ')} {high:.3g} is above {bound:.3g}"
    return None


def decide(
    entry: Entry | None,
    limits: Limits,
    *,
    source: str | None = None,
    roles: tuple[Role, ...] = ROLES,
    why_wide: str | None = None,
    why_cannot: Callable[[Choice], str | None] = lambda choice: None,
) -> Decision:
    """Returns what a site runs.

    Args:
        entry: what was measured of it; None if nothing was.
        limits: on errors and speed.
        source: whose operands the errors are of; else, and where they are not known,
            each candidate's largest of all.
        roles: that run: all in training, "fwd" alone in inference.
        why_wide: why nothing may be in FP8 here, or None.
        why_cannot: why a choice cannot run here, or None.
    """
    times = {} if entry is None else entry.times.get(pass_of(roles), {})
    if entry is None or BF16.name not in times:
        return Decision(BF16, "it was not measured")
    ranked = sorted(map(Choice.parse, times), key=lambda one: times[one.name])
    base = times[BF16.name]
    errors = _errors(entry, source)
    # First who multiplies in bfloat16, at no cost in accuracy: FP8 must beat that.
    wide = next(one for one in ranked if not one.is_fp8 and not why_cannot(one))
    if base / times[wide.name] < limits.leave_xla:
        wide = BF16
    lost: list[tuple[Choice, str]] = []
    chosen = wide
    for one in ranked:
        why_not = why_cannot(one)
        if why_not is None:
            why_not = _why_not(one, wide, times, errors, roles, limits, why_wide)
        if why_not is None:
            chosen = one
            break
        if one != wide:
            lost.append((one, why_not))
    others = [*lost, *((one, "slower") for one in ranked if one != chosen)]
    runner_up = next((f"{one.name}: {why}" for one, why in others), None)
    return Decision(
        chosen,
        _reason(chosen, lost),
        speedup=base / times[chosen.name],
        error=largest_error(chosen, entry, source, roles),
        runner_up=runner_up,
    )


def accurate(
    entry: Entry,
    limits: Limits,
    *,
    source: str | None = None,
    roles: tuple[Role, ...] = ROLES,
    why_wide: str | None = None,
    why_cannot: Callable[[Choice], str | None] = lambda choice: None,
) -> list[Choice]:
    """Returns the choices that were measured and keep the limits, whatever their speed.

    Arguments are those of `decide`.
    """
    errors = _errors(entry, source)
    return [
        one
        for one in map(Choice.parse, entry.times.get(pass_of(roles), {}))
        if why_cannot(one) is None
        and _why_inaccurate(one, errors, roles, limits, why_wide) is None
    ]


def _why_not(one, wide, times, errors, roles, limits, why_wide) -> str | None:
    """Returns why a candidate is not chosen, or None."""
    if not _multiplies_in_fp8(one, roles):
        return None if one == wide else "not faster than bfloat16 by XLA by enough"
    why_not = _why_inaccurate(one, errors, roles, limits, why_wide)
    if why_not is not None:
        return why_not
    speedup = times[wide.name] / times[one.name]
    if speedup < limits.speedup:
        return f"{speedup:.2f} times {wide.name}"
    speedup = times[BF16.name] / times[one.name]
    if one.provider != "xla" and speedup < limits.leave_xla:
        return f"{speedup:.2f} times {BF16.name}, too little for kernels of its own"
    return None


def _multiplies_in_fp8(one: Choice, roles: tuple[Role, ...]) -> bool:
    return any(one.recipe.gemm(role) for role in roles)


def _why_inaccurate(one, errors, roles, limits, why_wide) -> str | None:
    """Returns which limit a candidate breaks, or None."""
    if _multiplies_in_fp8(one, roles) and why_wide is not None:
        return why_wide
    for role in roles:
        gemm = one.recipe.gemm(role)
        if gemm is None:
            continue
        measured = errors_of(errors, role, gemm)
        if not measured:
            return f"{role}: its error was not measured"
        for error in measured:
            why = why_unsafe(error, healthy(gemm), limits)
            if why is not None:
                return f"{role}: {why}"
    return None


def errors_of(sources: list[RoleErrors], role: Role, gemm: GemmRecipe) -> list[Errors]:
    """Returns the errors of a product cast so, from each source that has them."""
    return [
        errors
        for of_roles in sources
        for name, errors in of_roles.get(role, {}).items()
        if get_recipe(name).gemm(role) == gemm
    ]


def _errors(entry: Entry, source: str | None) -> list[RoleErrors]:
    if source in entry.errors:
        return [entry.errors[source]]
    return list(entry.errors.values())


def largest_error(
    one: Choice,
    entry: Entry,
    source: str | None = None,
    roles: tuple[Role, ...] = ROLES,
) -> float | None:
    """Returns the largest relative L2 of a choice's FP8 products; None without any."""
    found = [
        error["relative_l2"].mean
        for role in roles
        if (gemm := one.recipe.gemm(role)) is not None
        for error in errors_of(_errors(entry, source), role, gemm)
    ]
    return max(found, default=None)


def _reason(chosen: Choice, lost: list[tuple[Choice, str]]) -> str:
    if chosen.is_fp8:
        return "the fastest that is accurate enough"
    if chosen == BF16 and not any(not one.is_fp8 for one, _ in lost):
        return "nothing else is fast and accurate enough"
    return "no FP8 is fast and accurate enough"


def pass_of(roles: tuple[Role, ...]) -> str:
    """Returns what a table calls the time of these products."""
    return "training" if roles == ROLES else "inference"
