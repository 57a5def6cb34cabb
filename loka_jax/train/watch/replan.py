"""Changes the plan of a run in progress, by what looks and live errors have shown."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from loka_jax import jsonfile
from loka_jax.dispatch.drift import after_change
from loka_jax.dispatch.groups import cross_networks
from loka_jax.dispatch.learned import keep_errors, kept_errors
from loka_jax.dispatch.outlook import entering, seconds_of
from loka_jax.dispatch.plan import DispatchPlan, as_json, from_json
from loka_jax.dispatch.policy import Decision
from loka_jax.dispatch.processes import same_text
from loka_jax.dispatch.review import live_intervals
from loka_jax.dispatch.table import RoleErrors
from loka_jax.nn import by_path
from loka_jax.probe.site import errors_of
from loka_jax.scaling import DelayedScaling, update_delayed
from loka_jax.site import BF16
from loka_jax.terminal import one_line
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.train.watch.host_state import Progress


class Change(NamedTuple):
    """A new plan, a sentence for each site that changes, and what the host knows."""

    plan: DispatchPlan
    said: tuple[str, ...]
    progress: Progress


def replanned(
    run: Run, state: TrainState, plan: DispatchPlan
) -> tuple[Run, TrainState]:
    """Returns the run under a new plan, and the state with the scales that it needs.

    Delayed scales that are new are of the amaxes at the newest observed step, so that
    the next step runs as all later ones; without one they are those before the first.
    """
    run = run.replanned(plan)
    fp8 = _merged(state.fp8, jax.jit(lambda: run.init().fp8)())
    return run, with_scales(run, dataclasses.replace(state, fp8=fp8))


def with_scales(run: Run, state: TrainState) -> TrainState:
    """Returns the state with the delayed scales that it lacks, if Probe saw amaxes."""
    seen = {path: errors_of(x).amaxes for path, x in by_path(state.probe).items()}
    recipes = {site.path: site.plan.choice.recipe for site in run.sites}

    def scaled(keys: Any, table: Array) -> Array:
        path = "/".join(str(key.key) for key in keys[:-1])
        amaxes, before = seen.get(path), DelayedScaling(table)
        # Layers of a stack share a path with one of them.
        if amaxes is None or path not in recipes or amaxes.ndim != table.ndim - 1:
            return table
        update = functools.partial(update_delayed, recipe=recipes[path])
        for _ in range(amaxes.ndim - 1):
            update = jax.vmap(update)
        is_new = jnp.all(table == 0)
        return jnp.where(is_new, update(before, amaxes).table, table)

    scale = functools.partial(jax.tree_util.tree_map_with_path, scaled)
    return dataclasses.replace(state, fp8=jax.jit(scale)(state.fp8))


def after_failure(run: Run, progress: Progress, error: Exception) -> Change | None:
    """Returns the plan without kernels, for a step of them that did not compile.

    None if that would not help: no site has a kernel, or memory ran out.
    """
    kernels = [path for path, choice in run.plan.choices if choice.provider != "xla"]
    if not kernels or "RESOURCE_EXHAUSTED" in str(error):
        return None
    reason = f"its step did not compile ({one_line(error)})"
    progress = dataclasses.replace(progress, broken=(*progress.broken, *kernels))
    return _change(run, dict.fromkeys(kernels, Decision(BF16, reason)), progress)


def after_alarms(run: Run, progress: Progress, paths: Sequence[str]) -> Change:
    """Returns the plan with those of these sites in bfloat16 that are not; they stay.

    A layer of a stack, `path[0]`, stands for its site.
    """
    reasons = {path.partition("[")[0]: "its monitors raised an alarm" for path in paths}
    demoted = _leaving(run, reasons, "has raised an alarm")
    progress = dataclasses.replace(progress, broken=(*progress.broken, *demoted))
    return _change(run, demoted, progress)


def agreed_review(
    run: Run, probe: Any, progress: Progress, say: Callable[[str], None]
) -> Change | None:
    """Returns the first process's `review` in all of them; all must call it.

    By times that each has measured for itself they would change the plan differently.
    """
    if jax.process_count() == 1:
        return review(run, probe, progress, say)
    text = ""
    if jax.process_index() == 0 and (change := review(run, probe, progress, say)):
        plan, said, after = change
        value = as_json(plan), said, dataclasses.asdict(after)
        text = jsonfile.dumps(value)
    if not (text := same_text(text)):
        return None
    plan, said, after = json.loads(text)
    plan = from_json(plan, run.sites, "the first process's plan")
    return Change(plan, tuple(said), Progress.from_json(after))


def review(
    run: Run, probe: Any, progress: Progress, say: Callable[[str], None]
) -> Change | None:
    """Returns the plan that all looks and live errors ask for; None if it is the run's.

    Live errors are kept for later runs. Where an earlier run has kept some, which are
    of later steps, the first review does not promote.

    Sites that have drifted run in bfloat16, with all sites of a cross network that is
    one operation; those whose operands are back, and whose live errors are within the
    limits where these count, run as they did before. Then live errors demote and
    promote, but for sites that have drifted and those with kernels that did not
    compile.
    """
    errors, demoted = _live_errors(run, probe), {}
    drifted, returning = _drifted(run, progress), _returning(run, errors, progress)
    now = _decisions(run)
    left = as_json(DispatchPlan(tuple((path, now[path]) for path in drifted)))
    drift = after_change(progress.drift, left, returning)
    changed, unsafe = {**drifted, **returning}, progress.unsafe
    if errors and (reviewer := run.reviewer_now) is not None:
        plan = run.plan.changed(changed)
        away = {path for path, site in drift.items() if site.left is not None}
        paths = {path for path, _ in plan.choices} - away - {*progress.broken}
        seen = {path: x for path, x in errors.items() if path in paths}
        demoted, promoted = reviewer.review(plan, seen, unsafe)
        if progress.step == run.config.probe.first_review():
            kept = kept_errors(run.source, run.sites)
            promoted = {path: x for path, x in promoted.items() if path not in kept}
        promoted = _worth_it(run, plan, promoted, progress.step, say)
        unsafe = tuple(dict.fromkeys((*unsafe, *demoted)))
        by_errors = {**demoted, **promoted}
        # Their measures were of other casts.
        drift = {path: x for path, x in drift.items() if path not in by_errors}
        changed |= by_errors
    if reason := keep_errors(run.source, run.sites, errors, demoted):
        say(reason)
    if not changed:
        return None
    progress = dataclasses.replace(progress, drift=drift, unsafe=unsafe)
    return _change(run, changed, progress)


def _worth_it(
    run: Run,
    plan: DispatchPlan,
    promoted: dict[str, Decision],
    step: int,
    say: Callable[[str], None],
) -> dict[str, Decision]:
    """Returns the promoted sites, or none if they save less than entering costs."""
    if not promoted or (reviewer := run.reviewer_now) is None:
        return promoted
    faster, left = plan.changed(promoted), run.total_steps - step
    calls = run.config.loop.calls
    programs = 0 if run.has_steps_of(faster) else len(calls)
    waits = seconds_of(run.sites, programs)
    how = run.sites, reviewer.performance, plan, faster, left
    worth = entering(*how, waits=waits)
    say(f"step {step:,}: {worth}{'' if worth.pays else ', so that it is not entered'}.")
    return promoted if worth.pays else {}


def _drifted(run: Run, progress: Progress) -> dict[str, Decision]:
    """Returns the decisions on sites in FP8 that have drifted, or follow others."""
    reasons = {path: x.why for path, x in progress.drift.items() if x.has_drifted}
    return _leaving(run, reasons, "has drifted")


def _leaving(run: Run, reasons: Mapping[str, str], what: str) -> dict[str, Decision]:
    """Returns the decisions on those of these sites that are in FP8, and followers.

    `what` is a clause on a site that others follow.
    """
    in_fp8 = {site.path for site in run.sites if site.is_fp8}
    left = {path: why for path, why in reasons.items() if path in in_fp8}
    for network in _cross_networks(run):
        if leaders := [path for path in network if path in left]:
            why = f"{leaders[0]} {what}, and its cross network is one operation"
            followers = in_fp8.intersection(network).difference(left)
            left |= {path: why for path in network if path in followers}
    return {path: Decision(BF16, why) for path, why in left.items()}


def _cross_networks(run: Run) -> list[list[str]]:
    """Returns the paths of each cross network whose sites have one choice.

    It is one operation with one choice; apart its sites would be slower in FP8 than in
    bfloat16.
    """
    decisions = _decisions(run)
    return [
        network
        for network in cross_networks(run.sites)
        if len({decisions[path].choice for path in network}) == 1
    ]


def _returning(
    run: Run, errors: Mapping[str, RoleErrors], progress: Progress
) -> dict[str, Decision]:
    """Returns the decisions on the sites that return from drift, by path."""
    away = {p: x.left for p, x in progress.drift.items() if x.left is not None}
    planned = dict(from_json(away, run.sites, "the checkpoint").decisions)
    back = {
        path: planned[path]._replace(reason="its operands are back")
        for path in away
        if progress.drift[path].is_back
        and (
            run.reviewer is None
            or run.reviewer.is_well_within(planned[path].choice, errors.get(path, {}))
        )
    }
    for network in _cross_networks(run):
        if not away.keys() & set(network) <= back.keys():  # it returns as a whole
            back = {path: x for path, x in back.items() if path not in network}
    return back


def _live_errors(run: Run, probe: Any) -> dict[str, RoleErrors]:
    """Returns the live errors of sites that were seen in enough steps, by path."""
    stats, recipes = by_path(probe), run.config.probe.recipes
    errors = jax.device_get({path: errors_of(x) for path, x in stats.items()})
    found = {path: live_intervals(x, recipes) for path, x in errors.items()}
    return {path: by_role for path, by_role in found.items() if any(by_role.values())}


def _change(run: Run, decisions: Mapping[str, Decision], progress: Progress) -> Change:
    said = []
    for path, (choice, reason, *_) in decisions.items():
        how = f"by {choice.name}" if choice.is_fp8 else "in bfloat16"
        said.append(f"step {progress.step:,}: {path} runs {how} now: {reason}.")
    return Change(run.plan.changed(decisions), tuple(said), progress)


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
