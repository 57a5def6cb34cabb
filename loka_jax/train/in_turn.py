"""The run of several processes: the first builds it, and the others follow."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax

from loka_jax import jsonfile
from loka_jax.dispatch.gradient_wire import GradientSum
from loka_jax.dispatch.plan import as_json
from loka_jax.train.build import Run
from loka_jax.train.checkpoints.orbax_files import meet
from loka_jax.train.mesh.placement import MeshPlacement
from loka_jax.train.processes.group import Processes


def build_in_turn(
    processes: Processes, build_run: Callable[[Any], Run], plan: Any
) -> Run:
    """Returns the run, built by the first of several processes before the others.

    They find the data that it has converted, and follow its plan, its choice of how
    gradients are summed, and when Probe observes. It alone reviews the plan.

    Args:
        build_run: builds it, with a plan as JSON values, or None to choose one.
        plan: of the checkpoint to go on from; None without one.

    Raises:
        ValueError: if several processes do not train on all of their devices.
    """
    first = build_run(plan) if processes.is_first else None
    meet(processes, "built")
    chosen = "" if first is None else jsonfile.dumps(_chosen(first))
    chosen = json.loads(processes.same(chosen))
    run = first or build_run(chosen["plan"])
    placement = run.placement
    if processes.count == 1:
        return run
    if placement.size != jax.device_count():
        raise ValueError(
            f"{processes.count} processes have {jax.device_count()} devices, and "
            f"--mesh.replicas x --mesh.shards are {placement.size}: use all of them, "
            "or start fewer processes."
        )
    assert isinstance(placement, MeshPlacement)
    gradient_sum = GradientSum(**chosen["gradients"])
    placement = dataclasses.replace(placement, gradient_sum=gradient_sum)
    if processes.is_first:
        return dataclasses.replace(run, placement=placement)
    config = run.config
    if chosen["begin"] is not None:
        config = config.observed(chosen["begin"], tuple(chosen["recipes"]))
    return dataclasses.replace(run, config=config, placement=placement, reviewer=None)


def _chosen(run: Run) -> dict[str, Any]:
    """Returns what all processes must do alike, as JSON values."""
    probe = run.config.probe
    observed = {"begin": probe.begin, "recipes": probe.recipes}
    return {"plan": as_json(run.plan), **observed, **run.placement.choices()}
