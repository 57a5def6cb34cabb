"""Checks what a plan chose by prediction, before it runs for the first time.

    plan -> candidates not measured here yet -> checked and timed -> plan again

until all that is chosen was checked, and all that would be if predicted times were at
the ends of their intervals; or until the budget is spent, or a check takes longer than
it may save of the run that waits for it: sites then give up what was not checked.
Results go to the user's cache, so a model is checked once.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from loka_jax.dispatch.at_start import candidate_job, measure_into_cache
from loka_jax.dispatch.attention import IN_BF16, known_times, with_attention_times
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan, chains_of
from loka_jax.dispatch.pool import Turns
from loka_jax.dispatch.table import MEASURES, Entry, RoleErrors, Table
from loka_jax.measure.checking import NO_MEMORY
from loka_jax.measure.intervals import Interval
from loka_jax.nn import Site
from loka_jax.recipe import RECIPES, ROLES
from loka_jax.site import BF16, Choice, SiteSpec

_DOUBT = 1.0  # spreads off its prediction at which a time may lie
# Of a check beside others at a time, on an H200: 2 kernels took 30 s, 14 took 44 s.
_SECONDS, _SECONDS_A_KERNEL = 28.0, 1.2
NOT_CHECKED, IN_TIME = "was not checked", "within"
_NOT_WORTH = "as that takes longer than they may save of this run"


class Budget(NamedTuple):
    """What checks of kernels may take.

    Attributes:
        seconds: after which a check under way is ended.
        option: the user's name for them.
        steps: of the run that waits for the checks; None if none waits, or if what is
            planned serves for longer than one run.
    """

    seconds: float
    option: str = "--dispatch.check-seconds"
    steps: int | None = None


class CheckedPlan(NamedTuple):
    """A plan of which every choice but XLA's bfloat16 was checked on this device.

    It was made by what is known of the performance; notes are for the user.
    """

    plan: DispatchPlan
    performance: PerformanceModel
    notes: tuple[str, ...] = ()


def check_plan(
    make_plan: Callable[[PerformanceModel], DispatchPlan],
    sites: Sequence[Site],
    performance: PerformanceModel,
    budget: Budget,
    say: Callable[[str], None] = print,
    *,
    pass_name: str = "training",
    turns: Turns | None = None,
) -> CheckedPlan:
    """Returns a plan for a pass, without choices that were never checked.

    Args:
        turns: as in `measure_all`.
    """
    start, left = time.monotonic(), budget.seconds
    if left > 0 and turns is None:  # else before, while nothing else ran
        performance = with_attention_times(performance, sites, say)
        left -= time.monotonic() - start
    while left > 0:
        jobs = to_check(make_plan, sites, performance, pass_name, steps=budget.steps)
        if not jobs:
            break
        say(
            f"Checking and timing {len(jobs)} kernels that run for the first time, for "
            f"{left:.0f} seconds at most."
        )
        start = time.monotonic()
        for _, measured in measure_into_cache(jobs, left, turns=turns):
            table = performance.table.merged(measured)
            performance = performance.with_table(table)
        left -= time.monotonic() - start
    why = f"{IN_TIME} {budget.seconds:.3g} seconds" if left <= 0 else _NOT_WORTH
    how = make_plan, sites, performance, pass_name
    plan, performance, given_up = _checked_part(*how, f"{NOT_CHECKED} {why}")
    entries = [performance.estimates(site.spec).entry for site in sites]
    too_large = sum(NO_MEMORY in entry.failures.values() for entry in entries)
    notes = ()
    if given_up:
        more = f": {budget.option} allows more, and what was checked is kept"
        notes += (
            f"Kernels of {len(given_up)} sites were not checked {why}, and do not run"
            f"{more if left <= 0 else ''}.",
        )
    if too_large:
        notes += (
            f"Kernels of {too_large} sites were not checked, as the GPU had too little "
            "memory left beside this run, and do not run: "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment leaves more, and "
            "so do fewer examples a batch.",
        )
    return CheckedPlan(plan, performance, notes)


def to_check(
    make_plan: Callable[[PerformanceModel], DispatchPlan],
    sites: Sequence[Site],
    performance: PerformanceModel,
    pass_name: str = "training",
    *,
    steps: int | None = None,
) -> list[Job]:
    """Returns the first jobs of `check_plan`, all if no `steps` of a run wait for them.

    Else those by which the steps and the check take least: of the plan and of what may
    be faster, of the plan, or none.
    """
    plan = make_plan(performance)
    plans = plan, make_plan(performance.hopeful(_DOUBT))
    jobs = unchecked(plans, sites, performance, pass_name)
    if steps is None or not jobs:
        return jobs
    without, *_ = _checked_part(make_plan, sites, performance, pass_name)
    needed = unchecked([plan], sites, performance, pass_name)

    def seconds(option: tuple[DispatchPlan, list[Job]]) -> float:
        us = sites_us(option[0], sites, performance)
        return us * steps / 1e6 + check_seconds(len(option[1]))

    return min([(without, []), (plan, needed), (plans[1], jobs)], key=seconds)[1]


def reopened(performance: PerformanceModel) -> PerformanceModel:
    """Returns what is known, with the candidates that checks gave up."""
    table = performance.table
    entries = {
        spec: dataclasses.replace(
            entry,
            failures={
                name: why
                for name, why in entry.failures.items()
                if not why.startswith(NOT_CHECKED)
            },
        )
        for spec, entry in table.sites.items()
    }
    return performance.with_table(dataclasses.replace(table, sites=entries))


def check_seconds(kernels: int) -> float:
    """Returns about how many seconds a check of some kernels takes."""
    return _SECONDS + kernels * _SECONDS_A_KERNEL if kernels else 0.0


def as_if_accurate(sites: Sequence[Site]) -> dict[str, RoleErrors]:
    """Returns errors by path with which FP8 is accurate enough at every site.

    A plan by them has the FP8 that a review may promote sites to.
    """
    nothing = {measure: Interval(0.0, 0.0, 0.0) for measure in MEASURES}
    fp8 = [name for name in RECIPES if name.startswith("fp8")]
    errors: RoleErrors = {role: dict.fromkeys(fp8, nothing) for role in ROLES}
    return {site.path: errors for site in sites}


def without_errors(
    sites: Sequence[Site], performance: PerformanceModel, config: str
) -> list[Site]:
    """Returns the sites on whose own operands no errors were measured."""
    return [
        site
        for site in sites
        if f"{config} {site.path}" not in performance.estimates(site.spec).entry.errors
    ]


def sites_us(
    plan: DispatchPlan, sites: Sequence[Site], performance: PerformanceModel
) -> float:
    """Returns the microseconds of a plan's sites, as far as known, in a step."""
    decisions = dict(plan.decisions)
    return sum(
        bf16_us(site, performance) / (decisions[site.path].speedup or 1.0)
        for site in sites
        if site.path in decisions
    )


def bf16_us(site: Site, performance: PerformanceModel) -> float:
    """Returns the microseconds of a site in XLA's bfloat16, 0 if they are not known.

    Of an attention, those of the forward pass by its kernels.
    """
    if site.attention is not None:
        return known_times(site, performance).get(IN_BF16.name, 0.0)
    times = performance.estimates(site.spec).entry.times.get("training", {})
    return times.get(BF16.name, 0.0)


def unchecked(
    plans: Iterable[DispatchPlan],
    sites: Sequence[Site],
    performance: PerformanceModel,
    pass_name: str,
) -> list[Job]:
    """Returns a job for each choice of some plans that was only predicted.

    XLA's bfloat16, which the choice was compared with, is timed too.
    """
    chained = {
        site.path for chain in chains_of(sites) if len(chain) > 1 for site in chain
    }
    specs = {x.path: table_key(x.spec) for x in sites if x.attention is None}
    chains: dict[tuple[SiteSpec, Choice], bool] = {}  # by candidate: in a chain, too
    for path, choice in itertools.chain(*(plan.choices for plan in plans)):
        if (spec := specs.get(path)) is None:
            continue
        estimates = performance.estimates(spec)
        if choice == BF16 or estimates.spread(pass_name, choice) is None:
            continue
        chains[spec, choice] = path in chained or chains.get((spec, choice), False)
        if estimates.spread(pass_name, BF16) is not None:
            chains[spec, BF16] = False
    return [
        candidate_job(spec, choice, pass_name, in_chain=in_chain)
        for (spec, choice), in_chain in chains.items()
    ]


def _checked_part(
    make_plan: Callable[[PerformanceModel], DispatchPlan],
    sites: Sequence[Site],
    performance: PerformanceModel,
    pass_name: str,
    why: str = NOT_CHECKED,
) -> tuple[DispatchPlan, PerformanceModel, set[SiteSpec]]:
    """Returns the plan of what was checked, by what, and the sites that give up more.

    Args:
        why: of what they give up.
    """
    plan, given_up = make_plan(performance), set()
    while jobs := unchecked([plan], sites, performance, pass_name):
        table = performance.table
        for spec, choice, *_ in jobs:
            given_up.add(spec)
            if choice not in (None, BF16):
                entry = Entry(failures={choice.name: why})
                table = table.merged(Table(header_here(), {spec: entry}))
        performance = performance.with_table(table)
        plan = make_plan(performance)
    return plan, performance, given_up
