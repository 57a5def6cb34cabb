"""Memory and wire that are planned, against programs compiled for eight CPU devices.

With lists as long as they are: how long is a matter of the ids.
"""

import dataclasses
import math

import jax
import pytest

from loka_jax.data import DataConfig, generated
from loka_jax.optim import OptimConfig
from loka_jax.train import build as build_lib
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.planner.mesh_plan import Mesh, Rates, estimate
from loka_jax.train.planner.workload import SPARE, workload_of
from tests.support import train as support
from tests.support.mesh import collectives

BATCH, EVERY = 2_048, 2
DATA = DataConfig(examples=BATCH, eval_examples=64, rows=(4_000,) * 4)
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def run_of(replicas, shards, **mesh):
    config = support.config(batch_size=BATCH, data=DATA)
    config = dataclasses.replace(
        config,
        model=config.model.clone(recipe="bf16", dropout_rate=0.0),
        optim=OptimConfig(lr=0.01, rows="rowwise_adagrad", rows_lr=0.1),
        mesh=MeshConfig(replicas=replicas, shards=shards, **mesh),
    )
    return build_lib.build(config, None, lambda line: None)


def planned(run, mesh):
    """Returns what is planned for lists of the capacity that they have."""
    workload = workload_of(
        run.config, generated.schema_of(DATA), BATCH // mesh.gpus, dense_us=1.0
    )
    (stack,) = workload.stacks
    sent = mesh.shards * run.placement.router.capacity
    stack = dataclasses.replace(stack, distinct=sent / SPARE, averaged=(0.0,) * 4)
    return estimate(dataclasses.replace(workload, stacks=(stack,)), mesh, Rates())


def gathered(program):
    """Returns the bytes that a device gathers of all replicas."""
    sizes = {"s32": 4, "u16": 2, "f32": 4}
    found = [x for x in collectives(program.as_text()) if x[0] == "all-gather"]
    assert {axes for *_, axes in found} == {"'replica'"}
    return sum(sizes[dtype] * count for _, dtype, count, _ in found)


def test_a_step_holds_and_gathers_the_lists_of_all_replicas():
    run = run_of(8, 1)
    batch = run.read(run.splits.train, 0)
    step = run.train_step().lower(run.init(), batch).compile()
    plan = planned(run, Mesh(8, 1))
    parts = plan.memory
    held = sum(parts.values()) - parts["tables"] - parts["dense"]
    assert held == parts["replicas"]
    memory = step.memory_analysis()
    assert held == pytest.approx(memory.temp_size_in_bytes, rel=0.15)
    assert plan.wire["replicas"] == pytest.approx(gathered(step) * 7 / 8)


def test_the_log_is_what_steps_return():
    run = run_of(4, 2, sync="weights", sync_every=EVERY)
    step = run.train_step().lower(run.init(), run.read(run.splits.train, 0))
    _, before, _ = step.out_info
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(before)]
    log = planned(run, Mesh(4, 2)).memory["log"]
    assert log == pytest.approx(EVERY * sum(sizes) / 8)
