"""Builds a run in several processes: what the first has made is everyone's."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax

from loka_jax import jsonfile
from loka_jax.dispatch.plan import as_json
from loka_jax.train.build import Run
from loka_jax.train.processes import Processes
from loka_jax.train.shared_save import meet


def built_in_turn(
    processes: Processes, build_run: Callable[[Any], Run], plan: Any
) -> Run:
    """Returns the run, built by the first of several processes before the others.

    They find the data that it has converted, and follow the plan that it has made.

    Args:
        processes: of the run.
        build_run: builds it, with a plan as JSON values, or None to choose one.
        plan: of the checkpoint to go on from; None without one.

    Raises:
        ValueError: if several processes do not train on all of their devices.
    """
    first = build_run(plan) if processes.is_first else None
    meet(processes, "built")
    made = "" if first is None else jsonfile.dumps(as_json(first.plan))
    made = processes.same(made)
    run = first or build_run(json.loads(made))
    _require_all_devices(run, processes)
    # By times that each has measured for itself they would change it differently.
    return run if processes.count == 1 else dataclasses.replace(run, reviewer=None)


def _require_all_devices(run: Run, processes: Processes):
    """Raises ValueError if several processes do not train on all of their devices."""
    used = 1 if run.spread is None else run.spread.mesh.size
    if processes.count > 1 and used != jax.device_count():
        raise ValueError(
            f"{processes.count} processes have {jax.device_count()} devices, and "
            f"--mesh.replicas x --mesh.shards are {used}: use all of them, or start "
            "fewer processes."
        )
