"""Builds a run in several processes: what the first has made is everyone's."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax

from loka_jax import jsonfile
from loka_jax.dispatch.plan import as_json
from loka_jax.train.build import Run
from loka_jax.train.checkpoints.orbax_files import meet
from loka_jax.train.mesh.gradient_sum import GradientSum
from loka_jax.train.processes.group import Processes


def built_in_turn(
    processes: Processes, build_run: Callable[[Any], Run], plan: Any
) -> Run:
    """Returns the run, built by the first of several processes before the others.

    They find the data that it has converted, and follow its plan and its choice of how
    gradients are summed.

    Args:
        processes: of the run.
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
    _require_all_devices(run, processes)
    if processes.count == 1:
        return run
    # By times that each has measured for itself they would change it differently.
    summed = GradientSum(**chosen["summed"])
    return dataclasses.replace(run, summed=summed, reviewer=None)


def _chosen(run: Run) -> dict[str, Any]:
    """Returns what all processes must do alike, as JSON values."""
    summed = None if run.summed is None else run.summed._asdict()
    return {"plan": as_json(run.plan), "summed": summed}


def _require_all_devices(run: Run, processes: Processes):
    """Raises ValueError if several processes do not train on all of their devices."""
    used = 1 if run.spread is None else run.spread.mesh.size
    if processes.count > 1 and used != jax.device_count():
        raise ValueError(
            f"{processes.count} processes have {jax.device_count()} devices, and "
            f"--mesh.replicas x --mesh.shards are {used}: use all of them, or start "
            "fewer processes."
        )
