"""Chooses the plan that a run follows, with notes for the user."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from loka_jax import jsonfile
from loka_jax.commands import command
from loka_jax.dispatch import plan as plans
from loka_jax.dispatch.at_start import tune_at_start
from loka_jax.dispatch.entering import entering
from loka_jax.dispatch.first_use import (
    CheckedPlan,
    as_if_accurate,
    check_plan,
    without_errors,
)
from loka_jax.dispatch.learned import kept_errors
from loka_jax.dispatch.local import Local, local_performance, performance_of
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.runnable import why_not_runnable
from loka_jax.nn import Site
from loka_jax.train.config import LOOK_EVERY, Config

AUTO, TUNE, OFF = "auto", "tune", "off"


class ChosenPlan(NamedTuple):
    """A plan, notes for the user, and by what it was made, if by times."""

    plan: DispatchPlan
    notes: tuple[str, ...] = ()
    performance: PerformanceModel | None = None
    is_observed: bool = False  # Probe is to observe a run that leaves it to its plan


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
    options, every = config.dispatch, config.probe.every
    path = _file(config)
    if path is not None and _is_plan(path):
        plan = _runnable(plans.load(path, sites), str(path), sites)
        ruled = plans.make_plan(sites, None, rules=options.by_pattern)
        return ChosenPlan(plan.changed(dict(ruled.decisions)))
    if config.plan == TUNE:
        performance, notes = tune_at_start(
            sites, options.tune_seconds, name=config.name, say=say
        )
    else:
        performance, notes = _known(config)
    rules = dict(limits=options.limits, rules=options.by_pattern, config=source)
    make_plan = functools.partial(plans.make_plan, sites, **rules)
    if performance is None:
        return ChosenPlan(make_plan(None), notes)
    kept = kept_errors(source, sites)
    make_plan = functools.partial(make_plan, errors=kept)

    def checked(performance: PerformanceModel, **errors: Any) -> CheckedPlan:
        make = functools.partial(make_plan, **errors)
        return check_plan(make, sites, performance, options.check_seconds, say)

    plan, performance, more = checked(performance)
    chosen = ChosenPlan(plan, (*notes, *more), performance)
    if every:  # a review promotes to what was checked
        promoted = checked(performance, errors=as_if_accurate(sites))
        return chosen._replace(performance=promoted.performance)
    if every == 0 or jax.process_count() > 1:  # others review no plan
        return chosen
    if any(choice.is_fp8 and path in kept for path, choice in plan.choices):
        note = (
            "Errors that an earlier run has kept count, and Probe observes every "
            f"{LOOK_EVERY}th step, by which they are judged."
        )
        return chosen._replace(notes=(*chosen.notes, note), is_observed=True)
    unknown = [site for site in sites if site.path not in kept]
    hope = kept | as_if_accurate(without_errors(unknown, performance, source))
    fast = make_plan(performance, errors=hope)
    worth = entering(sites, performance, plan, fast, steps, is_observed=False)
    if worth.saves <= 0:
        return chosen
    if not worth.pays:
        note = (
            f"The errors of its FP8 are not known: {worth}, so that this run does not "
            f"look for them (--probe.every {LOOK_EVERY} does, for later runs too)."
        )
        return chosen._replace(notes=(*chosen.notes, note))
    fast, performance, _ = checked(performance, errors=hope)
    plan = make_plan(performance)
    worth = entering(sites, performance, plan, fast, steps, is_observed=False)
    if not worth.pays:
        return chosen
    note = (
        f"Probe observes every {LOOK_EVERY}th step, until the errors of its FP8 are "
        f"known: {worth} (--probe.every 0 observes none)."
    )
    return ChosenPlan(plan, (*chosen.notes, note), performance, is_observed=True)


def resumed_plan(config: Config, value: Any, sites: Sequence[Site]) -> ChosenPlan:
    """Returns the plan of a checkpoint, with what live errors may change it by.

    Raises:
        ValueError: if the plan cannot run here.
    """
    chosen = ChosenPlan(saved_plan(value, sites))
    if not config.probe.every:
        return chosen
    try:
        return chosen._replace(performance=_known(config).performance)
    except ValueError as error:  # the plan needs no table any more
        note = f"Live errors will not change the plan: {error}"
        return chosen._replace(notes=(note,))


def saved_plan(value: Any, sites: Sequence[Site]) -> DispatchPlan:
    """Returns the plan of a checkpoint from its JSON values.

    Raises:
        ValueError: if it cannot run here.
    """
    source = "the checkpoint's plan"
    return _runnable(plans.from_json(value, sites, source), source, sites)


def _file(config: Config) -> pathlib.Path | None:
    """Returns the file that `--plan` names, if it names one."""
    if config.plan in (AUTO, TUNE, OFF):
        return None
    path = pathlib.Path(config.plan)
    if not path.is_file():
        raise ValueError(
            f"--plan {path} is not a file: give a table of {command('tune.py')!r}, a "
            f"plan, or one of {AUTO!r}, {TUNE!r} and {OFF!r}."
        )
    return path


def _known(config: Config) -> Local:
    """Returns what is known of the times here, without measuring any."""
    if config.plan == OFF:
        return Local(None)
    path = _file(config)
    if path is None:
        return local_performance()
    return Local(None if _is_plan(path) else performance_of(path))


def _is_plan(path: pathlib.Path) -> bool:
    """Returns whether a file is a plan rather than a table."""
    try:
        value = jsonfile.read(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    return not (isinstance(value, dict) and "schema" in value)


def _runnable(plan: DispatchPlan, source: str, sites: Sequence[Site]) -> DispatchPlan:
    if reason := why_not_runnable(plan, sites):
        raise ValueError(f"{source}: {reason}: leave --plan out, or give --plan off.")
    return plan
