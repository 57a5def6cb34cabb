"""Chooses the plan that a run follows, with notes for the user."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from loka_jax.dispatch import plan as plans
from loka_jax.dispatch.at_start import tune_at_start
from loka_jax.dispatch.first_use import (
    Budget,
    CheckedPlan,
    as_if_accurate,
    check_plan,
    reopened,
    to_check,
    without_errors,
)
from loka_jax.dispatch.hope import Hope
from loka_jax.dispatch.learned import kept_errors
from loka_jax.dispatch.local import Local, local_performance, performance_of
from loka_jax.dispatch.outlook import (
    Entering,
    Remedies,
    entering,
    last_line,
    seconds_of,
    steps_meanwhile,
)
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.pool import Turns
from loka_jax.dispatch.table import RoleErrors
from loka_jax.nn import Site
from loka_jax.probe.live_errors import RECIPES
from loka_jax.recipe import ROLES, get_recipe
from loka_jax.train.config import Config
from loka_jax.train.loop_options import LOOK_EVERY
from loka_jax.train.mesh.devices import shape_of
from loka_jax.train.plan_files import (
    OFF,
    TUNE,
    is_plan,
    named_file,
    runnable,
    saved_plan,
)

_REMEDIES = Remedies(
    errors=f"--probe.every {LOOK_EVERY} measures them",
    seconds="--dispatch.check-seconds allows more",
    recipe="--recipe names another",
)
# Seconds for checks beside a run that compiles and trains over those for which one
# waits: on an H200, 15 kernels took 62 s beside Wukong M's first minute, 44 s alone.
_BESIDE = 2.0


class Observed(NamedTuple):
    """From which step on Probe observes a run, and whose errors it measures."""

    begin: int
    recipes: tuple[str, ...]


class ChosenPlan(NamedTuple):
    """A plan, notes for the user, and by what it was made, if by times.

    Attributes:
        observed: how Probe is to observe a run that leaves it to its plan; None if it
            is not to.
        hope: the plan of a review that finds all errors within the limits; None without
            such a review, or if it would change nothing.
        outlook: what the plan gains, or what keeps FP8 out of it, as a sentence.
    """

    plan: DispatchPlan
    notes: tuple[str, ...] = ()
    performance: PerformanceModel | None = None
    observed: Observed | None = None
    hope: Hope | None = None
    outlook: str = ""


def choose_plan(
    config: Config,
    sites: Sequence[Site],
    steps: int,
    say: Callable[[str], None] = print,
    *,
    source: str = "",
) -> ChosenPlan:
    """Returns the plan that `--plan` asks for.

    Errors that an earlier run of the same has kept count as its own. A run is observed
    if it enters FP8 by these; and if FP8 that only lacks known errors would save more
    of the run than it takes to find out.

    Args:
        source: the name of its operands, whose errors count (`Config.source`).

    Raises:
        ValueError: if it names a file that is no plan and no table for this machine, or
            a rule matches no site.
    """
    options = config.dispatch
    path = named_file(config)
    if path is not None and is_plan(path):
        plan = runnable(plans.load(path, sites), str(path), sites)
        ruled = plans.make_plan(sites, None, rules=options.by_pattern)
        return ChosenPlan(plan.changed(dict(ruled.decisions)))
    if config.plan == TUNE:
        performance, notes = tune_at_start(
            sites, options.tune_seconds, name=config.name, say=say
        )
    else:
        performance, notes = _known(config)
    if performance is None:
        rules = options.by_pattern
        plan = plans.make_plan(sites, None, rules=rules, config=source)
        return ChosenPlan(plan, notes)
    by_times = _ByTimes(config, sites, steps, say, source, kept_errors(source, sites))
    chosen = by_times.choose(performance)
    outlook = by_times.outlook(chosen)
    return chosen._replace(notes=(*notes, *chosen.notes), outlook=outlook)


@dataclasses.dataclass(frozen=True)
class _ByTimes:
    """Chooses the plan of a run by what is known of times.

    Attributes:
        kept: live errors that an earlier run of the same has kept.
    """

    config: Config
    sites: Sequence[Site]
    steps: int
    say: Callable[[str], None]
    source: str
    kept: dict[str, RoleErrors]

    def choose(self, performance: PerformanceModel) -> ChosenPlan:
        """Returns the plan, and whether Probe is to find out what would change it."""
        every = self.config.probe.every
        steps = self._steps_of_first(performance)
        plan, performance, notes = self._checked(performance, self.kept, steps=steps)
        chosen = ChosenPlan(plan, notes, performance)
        if every:
            return chosen._replace(hope=self.hope(performance))
        if every == 0:
            return chosen
        if _in_fp8(plan) & self.kept.keys():
            note = (
                "Errors that an earlier run has kept count, and Probe observes every "
                f"{LOOK_EVERY}th step, by which they are judged."
            )
            notes, observed = (*notes, note), Observed(0, _families(plan))
            return chosen._replace(notes=notes, observed=observed)
        return self._observed_if_it_gains(chosen, performance)

    def _steps_of_first(self, performance: PerformanceModel) -> int:
        """Returns for about how many steps the run follows its first plan.

        Over several devices, of which FP8's kernels are checked before the first step,
        all steps.
        """
        if self.config.probe.every is not None or not self.is_alone:
            return self.steps
        plan = self._make(self.sites, performance, self.kept)
        if _in_fp8(plan):
            return self.steps
        chosen = self._observed_if_it_gains(ChosenPlan(plan), performance)
        if chosen.observed is None or chosen.hope is None or not chosen.hope.is_awaited:
            return self.steps
        probe = self.config.observed(*chosen.observed).probe
        return probe.first_review() or self.steps

    def _observed_if_it_gains(
        self, chosen: ChosenPlan, performance: PerformanceModel
    ) -> ChosenPlan:
        """Returns the plan, observed if FP8 that lacks errors alone would gain.

        On one device what that needs is compiled while the run trains, which costs the
        run next to nothing; over a mesh it is observed only if FP8 pays for it.
        """
        unknown = [site for site in self.sites if site.path not in self.kept]
        unknown = without_errors(unknown, performance, self.source)
        hope = self.kept | as_if_accurate(unknown)

        def make(known: PerformanceModel) -> DispatchPlan:
            return self._make(self.sites, known, hope)

        performance = reopened(performance)
        fast = make(performance)
        if fast.choices == chosen.plan.choices:
            return chosen
        kernels = len(to_check(make, self.sites, performance))
        begin, worth = self._entering(performance, chosen.plan, fast, kernels)
        if begin is None:
            note = (
                "The errors of its FP8 are not known, and this run is too short to "
                f"look for them: {worth} ({_REMEDIES.errors}, for later runs too)."
            )
            return chosen._replace(notes=(*chosen.notes, note))
        where = f"from step {begin:,} on, " if begin else ""
        note = (
            f"Probe observes every {LOOK_EVERY}th step, {where}to learn the errors of "
            f"its FP8 for {'this run' if worth.pays else 'later runs'}: {worth} "
            "(--probe.every 0 observes none)."
        )
        return chosen._replace(
            notes=(*chosen.notes, note),
            observed=Observed(begin, _families(fast)),
            hope=self.hope(performance, hope, is_awaited=worth.pays),
        )

    def hope(
        self,
        performance: PerformanceModel,
        errors: Mapping[str, RoleErrors] | None = None,
        *,
        is_awaited: bool = True,
    ) -> Hope:
        """Returns the plan by such errors, all as small as they may be if None.

        A review promotes to what was checked. One device checks it while it trains, for
        later runs, too.
        """
        hoped = as_if_accurate(self.sites) if errors is None else errors
        steps = None if self.is_alone else self.steps

        def check(turns: Turns) -> CheckedPlan:
            checked = self._checked(performance, hoped, turns, steps=steps)
            if not is_awaited:  # but for later runs, whose plan may be another
                self._checked(checked.performance, self.kept, turns)
            return checked

        hope = Hope(check, is_awaited=is_awaited)
        if not self.is_alone:
            hope.checked()
        return hope

    @property
    def is_alone(self) -> bool:
        """True for a run on one device."""
        return shape_of(self.config.mesh) == (1, 1)

    def outlook(self, chosen: ChosenPlan) -> str:
        """Returns what a plan gains, or what keeps FP8 out of it."""
        remedies, known = _REMEDIES, chosen.performance
        if chosen.observed is not None or self.config.probe.every:
            remedies = remedies._replace(errors="Probe measures them in this run")

        def make(sites: Sequence[Site], known: PerformanceModel, errors=self.kept):
            return self._make(sites, known, errors)

        return last_line(chosen.plan, self.sites, known, make, remedies)

    def _make(
        self,
        sites: Sequence[Site],
        performance: PerformanceModel,
        errors: Mapping[str, RoleErrors],
    ) -> DispatchPlan:
        options = self.config.dispatch
        return plans.make_plan(
            sites,
            performance,
            limits=options.limits,
            rules=options.by_pattern,
            config=self.source,
            errors=errors,
        )

    def _checked(
        self,
        performance: PerformanceModel,
        errors: Mapping[str, RoleErrors],
        turns: Turns | None = None,
        *,
        steps: int | None = None,
    ) -> CheckedPlan:
        def make(known: PerformanceModel) -> DispatchPlan:
            return self._make(self.sites, known, errors)

        seconds = self.config.dispatch.check_seconds
        if turns is not None and self.is_alone:
            seconds *= _BESIDE
        budget = Budget(seconds, steps=steps)
        return check_plan(make, self.sites, performance, budget, self.say, turns=turns)

    def _entering(
        self,
        performance: PerformanceModel,
        plan: DispatchPlan,
        faster: DispatchPlan,
        kernels: int,
    ) -> tuple[int | None, Entering]:
        """Returns the first step to observe, and what FP8 saves after the review.

        None if nothing is to be observed: the run ends before the review or, over a
        mesh, which compiles nothing meanwhile, FP8 does not pay.
        """
        of_plan = self.sites, performance, plan
        to_observe = seconds_of(self.sites, 1)
        to_run = seconds_of(self.sites, len(self.config.loop.calls), kernels)

        def entering_after(begin: int, waits: float) -> tuple[int, Entering]:
            review = self.config.observed(begin, RECIPES).probe.first_review()
            assert review is not None
            left = self.steps - review
            return left, entering(*of_plan, faster, left, waits=waits)

        if not self.is_alone:
            _, worth = entering_after(0, to_observe + to_run)
            return (0 if worth.pays else None), worth
        # What observes is compiled first. By the review FP8 is ready, or the run waits.
        observed = self.config.observed(0, RECIPES).probe.first_review() or 0
        first = steps_meanwhile(*of_plan, to_observe)
        for meanwhile, waits in ((to_run, 0.0), (0.0, to_run)):
            last = steps_meanwhile(*of_plan, meanwhile) - observed
            begin = math.ceil(max(first, last) / LOOK_EVERY) * LOOK_EVERY
            left, worth = entering_after(begin, waits)
            if worth.pays:
                return begin, worth
        return (begin if left > 0 else None), worth


def _in_fp8(plan: DispatchPlan) -> set[str]:
    """Returns the paths of the sites that a plan runs in FP8."""
    return {path for path, choice in plan.choices if choice.is_fp8}


def _families(plan: DispatchPlan) -> tuple[str, ...]:
    """Returns the recipes whose products a plan runs, of those that Probe measures."""
    running = [choice.recipe for _, choice in plan.choices if choice.is_fp8]
    return tuple(
        name
        for name in RECIPES
        for own in [get_recipe(name)]
        if any(
            own.gemm(role) is not None and own.gemm(role) == recipe.gemm(role)
            for recipe in running
            for role in ROLES
        )
    )


def resumed_plan(
    config: Config,
    value: Any,
    sites: Sequence[Site],
    say: Callable[[str], None] = print,
    *,
    source: str = "",
) -> ChosenPlan:
    """Returns the plan of a checkpoint, with what live errors may change it by.

    Raises:
        ValueError: if the plan cannot run here.
    """
    chosen = ChosenPlan(saved_plan(value, sites))
    if not config.probe.observe_every:
        return chosen
    try:
        performance = _known(config).performance
    except ValueError as error:  # the plan needs no table any more
        note = f"Live errors will not change the plan: {error}"
        return chosen._replace(notes=(note,))
    by_times = _ByTimes(config, sites, 0, say, source, {})
    hope = None
    if performance is not None and by_times.is_alone:  # else checked before training
        hope = by_times.hope(performance)
    return chosen._replace(performance=performance, hope=hope)


def _known(config: Config) -> Local:
    """Returns what is known of the times here, without measuring any."""
    if config.plan == OFF:
        return Local(None)
    path = named_file(config)
    if path is None:
        return local_performance()
    return Local(None if is_plan(path) else performance_of(path))
