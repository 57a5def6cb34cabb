"""Several processes train the run that the first has built."""

import dataclasses

import jax
import pytest

from loka_jax.dispatch.gradient_wire import GradientSum
from loka_jax.train import in_turn
from loka_jax.train.build import build
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.processes.group import Processes
from tests.support import train as support
from tests.support import without_data

TOLD = """
{
  "plan": {"a": 1},
  "begin": 5,
  "recipes": ["fp8_rowwise"],
  "gradients": {"wire": "bf16", "reason": "r", "num_bytes": 3}
}
"""


@pytest.mark.parametrize("index", [0, 1])
def test_processes_build_in_turn_what_the_first_has_chosen(monkeypatch, index):
    events, said = [], []
    without_data.patch_build(monkeypatch)
    monkeypatch.setattr(in_turn, "meet", lambda *args: events.append(args[1]))
    same = lambda _, text: said.append(text) or TOLD  # noqa: E731
    monkeypatch.setattr(Processes, "same", same)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    mesh = MeshConfig(replicas=2, shards=2)
    run = build(dataclasses.replace(support.config(), mesh=mesh))
    gradient_sum = GradientSum("int8", "as asked", 8)
    placement = dataclasses.replace(run.placement, gradient_sum=gradient_sum)
    own = dataclasses.replace(run, placement=placement, reviewer="reviewer")
    build_run = lambda plan: events.append(plan) or own  # noqa: E731
    run = in_turn.build_in_turn(Processes(index, 2), build_run, "saved")
    assert events == (["built", {"a": 1}] if index else ["saved", "built"])
    assert run.placement.gradient_sum == ("bf16", "r", 3)
    # The first one alone reviews the plan; all observe when it does.
    assert run.reviewer == (None if index else "reviewer")
    assert run.config.probe.begin == (5 if index else None)
    assert bool(said[0]) == ("int8" in said[0]) == (index == 0)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with pytest.raises(ValueError, match="2 processes have 8 devices, and .* are 4"):
        in_turn.build_in_turn(Processes(index, 2), build_run, None)
