"""A run that waits for its host is told so, if that costs it more than compiling."""

import dataclasses

import jax
import pytest

from loka_jax.train import session
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.planner.host_note import host_note
from loka_jax.train.planner.mesh_plan import estimate
from loka_jax.train.planner.step_sizes import Mesh
from tests.support import train as support
from tests.unit.train.planner.mesh_plan_test import RATES, STEP

SLOW = dataclasses.replace(RATES, launch_us=100.0, call_us=8_000.0)


def test_a_slow_host_is_named_with_what_it_costs():
    note = host_note(STEP, Mesh(1, 4), 100_000, SLOW)
    # 8,100 and 1,100 us a step.
    assert note is not None and "--loop.steps-per-call 8 may save 700 of 810 s" in note
    assert "than 4 GPUs to run it" in note


@pytest.mark.parametrize(
    "workload, mesh, steps, rates",
    [
        (STEP, Mesh(1, 1), 100_000, SLOW),  # whose device keeps up
        (STEP, Mesh(1, 4), 5_000, SLOW),
        (dataclasses.replace(STEP, steps_per_call=8), Mesh(1, 4), 100_000, SLOW),
        (dataclasses.replace(STEP, dense_us=8_100.0), Mesh(1, 4), 100_000, SLOW),
        (STEP, Mesh(1, 4), 100_000, RATES),
    ],
)
def test_others_are_told_nothing(workload, mesh, steps, rates):
    assert estimate(workload, mesh, rates).step_us > 0
    assert host_note(workload, mesh, steps, rates) is None


def test_runs_over_several_gpus_are_told(monkeypatch):
    if jax.device_count() < 2:
        pytest.skip("needs two devices")
    mesh = MeshConfig(replicas=1, shards=2)
    config = dataclasses.replace(support.config(), mesh=mesh)
    run = dataclasses.replace(support.build(config), total_steps=10**7)
    assert session._host_note(run) is None  # of CPUs
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "than 2 GPUs to run it" in (session._host_note(run) or "")
    assert session._host_note(dataclasses.replace(run, total_steps=100)) is None
    assert session._host_note(dataclasses.replace(run, spread=None)) is None
