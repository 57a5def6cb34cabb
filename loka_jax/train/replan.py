"""Changes the plan of a run in progress."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from loka_jax.dispatch.plan import DispatchPlan, as_json, from_json
from loka_jax.dispatch.policy import Decision
from loka_jax.site import BF16
from loka_jax.terminal import one_line
from loka_jax.train.build import Run
from loka_jax.train.host_state import Progress
from loka_jax.train.state import TrainState


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

    Args:
        run: the run.
        state: its state.
        plan: the new plan.
    """
    run = run.replanned(plan)
    initial = jax.jit(lambda: run.init().fp8)()
    return run, dataclasses.replace(state, fp8=_merged(state.fp8, initial))


def demoted(run: Run, step: int, reasons: Mapping[str, str]) -> Change:
    """Returns the plan with sites in XLA's bfloat16.

    Args:
        run: the run.
        step: the number of steps taken.
        reasons: why, by path.
    """
    decisions = {path: Decision(BF16, reason) for path, reason in reasons.items()}
    said = tuple(
        f"step {step:,}: {path} runs in bfloat16 now: {reason}."
        for path, reason in reasons.items()
    )
    return Change(run.plan.changed(decisions), said)


def after_drift(run: Run, progress: Progress) -> tuple[Change, Progress] | None:
    """Returns the plan that the newest looks ask for; None if it is the run's.

    Sites that have drifted run in bfloat16; those whose operands are back run as they
    did before they drifted first.
    """
    watch, step = progress.drift, progress.step
    in_fp8 = {site.path for site in run.sites if site.is_fp8}
    drifted = {path: why for path, why in watch.drifted.items() if path in in_fp8}
    if not drifted and not watch.back:
        return None
    change = demoted(run, step, drifted)
    planned = dict(from_json(progress.planned, run.sites, "the checkpoint").decisions)
    before = _decisions(run)
    planned = {path: before[path] for path in drifted} | planned
    returning = {
        path: planned[path]._replace(reason=f"its operands are back at step {step:,}")
        for path in watch.back
    }
    said = tuple(
        f"step {step:,}: {path} runs by {decision.choice.name} again: its operands are "
        "back."
        for path, decision in returning.items()
    )
    progress = dataclasses.replace(
        progress,
        planned=as_json(DispatchPlan(tuple(planned.items()))),
        drift=watch.changed(drifted, watch.back),
    )
    return Change(change.plan.changed(returning), change.said + said), progress


def why_demoted(plan: DispatchPlan, error: Exception) -> dict[str, str]:
    """Returns why the sites with kernels are demoted when their step failed.

    Empty if that would not help: no site has a kernel, or memory ran out.

    Args:
        plan: the plan of the step.
        error: what a step raised that had never run.
    """
    kernels = [path for path, choice in plan.choices if choice.provider != "xla"]
    if "RESOURCE_EXHAUSTED" in str(error):
        return {}
    reason = f"its step did not compile ({one_line(error)})"
    return dict.fromkeys(kernels, reason)


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
