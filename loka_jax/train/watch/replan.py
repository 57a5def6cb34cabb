"""Changes the plan of a run in progress."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from loka_jax.dispatch.groups import cross_networks
from loka_jax.dispatch.plan import DispatchPlan, as_json, from_json
from loka_jax.dispatch.policy import Decision
from loka_jax.dispatch.review import live_intervals
from loka_jax.dispatch.table import RoleErrors
from loka_jax.nn import by_path
from loka_jax.site import BF16
from loka_jax.terminal import one_line
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.watch.host_state import Progress


class Change(NamedTuple):
    """A change of plan.

    Attributes:
        plan: the new plan.
        said: a sentence for each site that changes.
    """

    plan: DispatchPlan
    said: tuple[str, ...]


def replanned(
    run: Run, state: TrainState, plan: DispatchPlan
) -> tuple[Run, TrainState]:
    """Returns the run under a new plan, and the state with the scales that it needs.

    Sites that had no delayed scales get those before the first step.
    """
    run = run.replanned(plan)
    initial = jax.jit(lambda: run.init().fp8)()
    return run, dataclasses.replace(state, fp8=_merged(state.fp8, initial))


def after_failure(
    run: Run, progress: Progress, error: Exception
) -> tuple[Change, Progress] | None:
    """Returns the plan without kernels, for a step of them that did not compile.

    None if that would not help: no site has a kernel, or memory ran out.
    """
    kernels = [path for path, choice in run.plan.choices if choice.provider != "xla"]
    if not kernels or "RESOURCE_EXHAUSTED" in str(error):
        return None
    reason = f"its step did not compile ({one_line(error)})"
    broken = (*progress.broken, *kernels)
    change = _demoted(run, progress.step, dict.fromkeys(kernels, reason))
    return change, dataclasses.replace(progress, broken=broken)


def review(run: Run, probe: Any, progress: Progress) -> tuple[Change, Progress] | None:
    """Returns the plan that looks and live errors ask for; None if it is the run's.

    `progress` has all looks.
    """
    said: tuple[str, ...] = ()
    for after in (after_drift, after_review):
        if found := after(run, probe, progress):
            change, progress = found
            run, said = run.replanned(change.plan), said + change.said
    return (Change(run.plan, said), progress) if said else None


def after_drift(
    run: Run, probe: Any, progress: Progress
) -> tuple[Change, Progress] | None:
    """Returns the plan that the newest looks ask for; None if it is the run's.

    Sites that have drifted run in bfloat16, with all sites of a cross network that is
    one operation; those whose operands are back, and whose live errors are within the
    limits where these count, run as they did before. Arguments are those of `review`.
    """
    watch, step = progress.drift, progress.step
    in_fp8 = {site.path for site in run.sites if site.is_fp8}
    drifted = {path: why for path, why in watch.drifted.items() if path in in_fp8}
    drifted |= _followers(run, drifted, in_fp8)
    returning = _returning(run, probe, progress)
    if not drifted and not returning:
        return None
    change = _demoted(run, step, drifted)
    decisions = _decisions(run)
    left = as_json(DispatchPlan(tuple((path, decisions[path]) for path in drifted)))
    said = tuple(
        f"step {step:,}: {path} runs by {decision.choice.name} again: its operands are "
        "back."
        for path, decision in returning.items()
    )
    progress = dataclasses.replace(
        progress,
        planned=progress.planned | left,
        drift=watch.changed(drifted, returning),
    )
    return Change(change.plan.changed(returning), change.said + said), progress


def _followers(
    run: Run, drifted: Mapping[str, str], in_fp8: Collection[str]
) -> dict[str, str]:
    """Returns why other sites go with those that have drifted, by path.

    A cross network is one operation with one choice; apart its sites would be slower in
    FP8 than in bfloat16.
    """
    return {
        path: f"{leaders[0]} has drifted, and its cross network is one operation"
        for network in _cross_networks(run)
        if (leaders := [path for path in network if path in drifted])
        for path in network
        if path in in_fp8 and path not in drifted
    }


def _cross_networks(run: Run) -> list[list[str]]:
    """Returns the paths of each cross network whose sites have one choice."""
    decisions = _decisions(run)
    return [
        network
        for network in cross_networks(run.sites)
        if len({decisions[path].choice for path in network}) == 1
    ]


def _returning(run: Run, probe: Any, progress: Progress) -> dict[str, Decision]:
    """Returns the decisions on the sites that return from drift, by path."""
    planned = dict(from_json(progress.planned, run.sites, "the checkpoint").decisions)
    errors = _live_errors(run, probe, progress.drift.back)
    reason = f"its operands are back at step {progress.step:,}"
    back = {
        path: planned[path]._replace(reason=reason)
        for path in progress.drift.back
        if run.reviewer is None
        or run.reviewer.is_well_within(planned[path].choice, errors.get(path, {}))
    }
    away = set(progress.drift.away)
    for network in _cross_networks(run):
        if not away & set(network) <= back.keys():  # it returns as a whole
            back = {path: x for path, x in back.items() if path not in network}
    return back


def after_review(
    run: Run, probe: Any, progress: Progress
) -> tuple[Change, Progress] | None:
    """Returns the plan that live errors ask for; None if it is the run's.

    Sites that drift has demoted, and those with kernels that did not compile, stay as
    they are. Arguments are those of `review`.
    """
    if run.reviewer is None:
        return None
    left_alone = {*progress.drift.away, *progress.broken}
    reviewed = [path for path, _ in run.plan.choices if path not in left_alone]
    errors = _live_errors(run, probe, reviewed)
    demoted, promoted = run.reviewer.review(run.plan, errors, progress.unsafe)
    changed = {**demoted, **promoted}
    if not changed:
        return None
    said = tuple(_sentence(progress.step, path, x) for path, x in changed.items())
    progress = dataclasses.replace(
        progress,
        unsafe=tuple(dict.fromkeys((*progress.unsafe, *demoted))),
        drift=progress.drift.without(changed),  # its measures were of other casts
    )
    return Change(run.plan.changed(changed), said), progress


def _live_errors(run: Run, probe: Any, paths: Iterable[str]) -> dict[str, RoleErrors]:
    """Returns the live errors of sites that were seen in enough steps, by path."""
    stats, recipes = by_path(probe), run.config.probe.recipes
    errors = {path: stats[path].errors for path in paths if path in stats}
    found = {
        path: live_intervals(of_site, recipes)
        for path, of_site in jax.device_get(errors).items()
    }
    return {path: by_role for path, by_role in found.items() if any(by_role.values())}


def _demoted(run: Run, step: int, reasons: Mapping[str, str]) -> Change:
    """Returns the plan with sites in XLA's bfloat16, and the reasons by path."""
    decisions = {path: Decision(BF16, reason) for path, reason in reasons.items()}
    said = tuple(_sentence(step, path, x) for path, x in decisions.items())
    return Change(run.plan.changed(decisions), said)


def _sentence(step: int, path: str, decision: Decision) -> str:
    choice = decision.choice
    how = f"by {choice.name}" if choice.is_fp8 else "in bfloat16"
    return f"step {step:,}: {path} runs {how} now: {decision.reason}."


def _decisions(run: Run) -> dict[str, Decision]:
    """Returns the decisions on all sites; the model's own where the plan has none."""
    own = {
        site.path: Decision(site.plan.choice, "the model's recipe")
        for site in run.sites
    }
    return own | dict(run.plan.decisions)


def _merged(tree: Any, initial: Any) -> Any:
    """Returns nested dicts like `initial`, with the values of `tree` that there are."""
    if not isinstance(initial, dict):
        return tree
    return {
        name: _merged(tree[name], inner) if name in tree else inner
        for name, inner in initial.items()
    }
