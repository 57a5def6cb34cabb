"""Changes the plan of a run in progress."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.site import BF16
from loka_jax.terminal import one_line
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState


def replanned(
    run: Run, state: TrainState, plan: DispatchPlan
) -> tuple[Run, TrainState]:
    """Returns the run under a new plan, and the state with the scales that it needs.

    Args:
        run: the run.
        state: its state.
        plan: the new plan, whose delayed sites had delayed scales before.
    """
    run = run.replanned(plan)
    template = jax.eval_shape(lambda: run.init().fp8)
    fp8 = _restricted(state.fp8, template)
    return run, dataclasses.replace(state, fp8=fp8)


def demoted(plan: DispatchPlan, reasons: Mapping[str, str]) -> DispatchPlan:
    """Returns a plan with sites in XLA's bfloat16, given the reasons by path."""
    for path, reason in reasons.items():
        plan = plan.demoted(path, BF16, reason)
    return plan


def sentences(step: int, reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Returns a sentence for each site that is demoted after `step` steps."""
    return tuple(
        f"step {step:,}: {path} runs in bfloat16 now: {reason}"
        for path, reason in reasons.items()
    )


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


def _restricted(tree: Any, template: Any) -> Any:
    """Returns the entries of nested dicts that a template has too."""
    if not isinstance(template, dict):
        return tree
    return {name: _restricted(tree[name], inner) for name, inner in template.items()}
