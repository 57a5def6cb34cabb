"""What a plan gains, in a sentence; and what would change it if no site is in FP8.

The times are those of the sites, each by itself. What is said to change a plan was
tried on it: errors or rows were replaced, and the plan made again.

FP8 that a run may enter later is worth it if it saves more of the run than it takes:

    saves    (time of the sites now - by the faster plan) * steps left
    costs    what the run waits for: the program of an evaluation, and what no thread
             has done meanwhile: checks of kernels, programs of training steps

Both are estimates by the times of the sites and by their number, so that runs on one
kind of device decide alike.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from loka_jax.dispatch.candidates import why_no_fp8
from loka_jax.dispatch.first_use import (
    IN_TIME,
    NOT_CHECKED,
    as_if_accurate,
    bf16_us,
    check_seconds,
    sites_us,
)
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan, is_open
from loka_jax.dispatch.policy import NOT_MEASURED
from loka_jax.group import Cross, Dense, Member
from loka_jax.nn import Site
from loka_jax.ops.device import local_device
from loka_jax.site import SiteSpec

_LARGER = (4, 16)  # batches that are tried
# Of a training step with so many sites, and of an evaluation: Wukong M's 30 sites took
# 27 and 6 s on an H200.
_STEP_SECONDS_A_SITE, _EVALUATION_SECONDS_A_SITE = 0.9, 0.2
# A training step over its sites: Wukong M's took 22 and 15 ms.
STEP_OVER_SITES = 1.5

# From sites, what is known of the times and, if they are not the table's, errors.
type MakePlan = Callable[..., DispatchPlan]


class Remedies(NamedTuple):
    """What a user can do, as clauses after "No site runs in FP8: why; ".

    Attributes:
        errors: to have errors measured.
        seconds: to have more kernels checked.
        recipe: to let sites leave bfloat16.
    """

    errors: str
    seconds: str
    recipe: str


def speedup(
    plan: DispatchPlan, sites: Sequence[Site], performance: PerformanceModel
) -> float:
    """Returns how many times faster a plan's sites are than by XLA's bfloat16."""
    decided = [x for x in sites if is_open(x) or x.attention is not None]
    us = sites_us(plan, sites, performance)
    return sum(bf16_us(x, performance) for x in decided) / us if us else 1.0


def last_line(
    plan: DispatchPlan,
    sites: Sequence[Site],
    performance: PerformanceModel | None,
    make_plan: MakePlan,
    remedies: Remedies,
) -> str:
    """Returns a sentence on what a plan gains, or on what keeps FP8 out of it."""
    if performance is None:
        return _without_times()
    in_fp8 = sum(choice.is_fp8 for _, choice in plan.choices)
    gain = speedup(plan, sites, performance) - 1
    if in_fp8:
        return (
            f"{in_fp8} of {len(sites)} sites run in FP8: by their times, all sites "
            f"together are {gain:.0%} faster than by XLA's bfloat16."
        )
    reason = _why_not(sites, performance, make_plan, remedies, plan)
    kernels = "" if gain < 0.005 else f" Our bfloat16 makes them {gain:.0%} faster."
    return f"No site runs in FP8: {reason}.{kernels}"


def _without_times() -> str:
    device = jax.devices()[0]
    reason = why_no_fp8(local_device()) if device.platform == "gpu" else None
    reason = reason or f"a {device.platform.upper()} only emulates it"
    return f"FP8 gains nothing here, as {reason}: it needs an NVIDIA Hopper or Ada GPU."


def _why_not(
    sites: Sequence[Site],
    performance: PerformanceModel,
    make_plan: MakePlan,
    remedies: Remedies,
    plan: DispatchPlan,
) -> str:
    """Returns the one thing that keeps FP8 out, and what would change it."""
    open_sites = [site for site in sites if is_open(site)]
    if not open_sites:
        return "it has no product of data and a weight that Dispatch may change"
    if all(site.recipe == "bf16" for site in open_sites):
        return f"all recipes are bf16; {remedies.recipe}"
    hoped = make_plan(sites, performance, errors=as_if_accurate(sites))
    if _runs_fp8(hoped):
        faster = speedup(hoped, sites, performance) / speedup(plan, sites, performance)
        return _why_inaccurate(plan, hoped, remedies, faster - 1)
    reasons = [
        reason
        for site in open_sites
        for reason in performance.estimates(site.spec).entry.failures.values()
        if reason.startswith(NOT_CHECKED)
    ]
    if reasons:
        remedy = f"; {remedies.seconds}" if IN_TIME in reasons[0] else ""
        return f"what may be faster {reasons[0]}{remedy}"
    for factor in _LARGER:
        larger = [with_rows(site, float(factor)) for site in sites]
        found = make_plan(larger, performance, errors=as_if_accurate(sites))
        if _runs_fp8(found):
            gain = speedup(found, larger, performance) - 1
            return (
                f"it is not faster at these rows; a batch {factor} times as large "
                f"would run {gain:.0%} faster than XLA's bfloat16"
            )
    return "no kernel in FP8 is faster at these sites, nor at batches 16 times as large"


def _why_inaccurate(
    plan: DispatchPlan, hoped: DispatchPlan, remedies: Remedies, gain: float
) -> str:
    """Returns which errors keep FP8 out, by which sites would gain that much."""
    wanted = [path for path, choice in hoped.choices if choice.is_fp8]
    lost = {path: x.runner_up or x.reason for path, x in plan.decisions}
    reasons = {path: lost[path] for path in wanted}
    not_known = [p for p, x in reasons.items() if NOT_MEASURED in x or "borrowed" in x]
    would = f"would make all sites {gain:.0%} faster"
    if not_known:
        return (
            f"errors on the model's own operands are not known at {len(not_known)} "
            f"sites, where FP8 {would}; {remedies.errors}"
        )
    first = wanted[0]
    return (
        f"at {len(wanted)} sites, where FP8 {would}, its errors are above the limits "
        f"({first}: {reasons[first]}); a norm in front of them may lower the errors"
    )


def _runs_fp8(plan: DispatchPlan) -> bool:
    return any(choice.is_fp8 for _, choice in plan.choices)


def with_rows(site: Site, share: float) -> Site:
    """Returns a site, and its group, with a share of its rows, at least one."""

    def spec(spec: SiteSpec) -> SiteSpec:
        return dataclasses.replace(spec, m=max(1, math.ceil(share * spec.m)))

    def member(member: Member) -> Member:
        return member._replace(spec=spec(member.spec))

    def layer(layer: Dense | Cross) -> Dense | Cross:
        if isinstance(layer, Cross):
            members = tuple(tuple(map(member, own)) for own in layer.members)
            return dataclasses.replace(layer, members=members)
        own = None if layer.member is None else member(layer.member)
        return dataclasses.replace(layer, member=own)

    group = site.group
    if group is not None:
        rows = max(1, math.ceil(share * group.rows))
        layers = tuple(map(layer, group.layers))
        group = dataclasses.replace(group, rows=rows, layers=layers)
    plan = dataclasses.replace(site.plan, spec=spec(site.spec))
    return dataclasses.replace(site, plan=plan, group=group)


class Entering(NamedTuple):
    """The seconds of a run that FP8 saves, and those that entering it costs."""

    saves: float
    costs: float

    @property
    def pays(self) -> bool:
        """True if it saves more than it costs."""
        return self.saves > self.costs

    def __str__(self) -> str:
        """Returns both as a clause."""
        return (
            f"FP8 may save {self.saves:,.0f} s of the rest of the run, and entering it "
            f"takes some {self.costs:,.0f} s"
        )


def entering(
    sites: Sequence[Site],
    performance: PerformanceModel,
    plan: DispatchPlan,
    faster: DispatchPlan,
    steps: int,
    *,
    waits: float,
) -> Entering:
    """Returns what a faster plan saves of some steps, and what entering it costs.

    Args:
        waits: the seconds for which the run waits, beside those of an evaluation.
    """
    now, then = (sites_us(x, sites, performance) for x in (plan, faster))
    costs = _EVALUATION_SECONDS_A_SITE * len(sites) + waits
    return Entering((now - then) * max(steps, 0) / 1e6, costs)


def seconds_of(sites: Sequence[Site], programs: int, kernels: int = 0) -> float:
    """Returns the seconds of compiling programs of steps, and of checking kernels."""
    return programs * _STEP_SECONDS_A_SITE * len(sites) + check_seconds(kernels)


def steps_meanwhile(
    sites: Sequence[Site],
    performance: PerformanceModel,
    plan: DispatchPlan,
    seconds: float,
) -> int:
    """Returns the steps by a plan that take some seconds."""
    step_us = STEP_OVER_SITES * sites_us(plan, sites, performance)
    return math.ceil(seconds * 1e6 / step_us)
