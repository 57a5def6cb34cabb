"""The memory that is planned, against that of compiled programs on eight CPU devices.

With lists as long as they are: how long is a matter of the ids.
"""

import dataclasses
import functools

import jax
import pytest

from loka_jax.data import DataConfig, generated
from loka_jax.optim import OptimConfig
from loka_jax.train import build as build_lib
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.planner.mesh_memory import memory_of
from loka_jax.train.planner.mesh_workload import workload_of
from loka_jax.train.planner.step_sizes import SPARE, Mesh
from tests.train import support

BATCH, DIM = 2_048, 16
DATA = DataConfig(examples=BATCH, eval_examples=64, rows=(4_000,) * 4)
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@functools.cache
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
    """Returns the parts planned for lists of the capacity that they have."""
    workload = workload_of(
        run.config, generated.schema_of(DATA), BATCH // mesh.gpus, dense_us=1.0
    )
    (stack,) = workload.stacks
    sent = mesh.shards * run.spread.router.capacity
    stack = dataclasses.replace(stack, distinct=sent / SPARE)
    return memory_of(dataclasses.replace(workload, stacks=(stack,)), mesh)


def test_a_step_holds_the_lists_of_all_replicas():
    run = run_of(8, 1)
    step = run.first_step.lower(run.init(), run.read(run.splits.train, 0))
    memory = step.compile().memory_analysis()
    parts = planned(run, Mesh(8, 1))
    held = sum(parts.values()) - parts["tables"] - parts["dense"]
    assert held == parts["replicas"]
    assert held == pytest.approx(memory.temp_size_in_bytes, rel=0.15)
