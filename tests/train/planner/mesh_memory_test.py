"""The memory that is planned, against that of compiled programs on eight CPU devices.

With lists as long as they are: how long is a matter of the ids.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest

from loka_jax.data import DataConfig, generated
from loka_jax.ops import row_average
from loka_jax.optim import OptimConfig
from loka_jax.train import build as build_lib
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.planner.mesh_memory import memory_of
from loka_jax.train.planner.mesh_workload import workload_of
from loka_jax.train.planner.step_sizes import SPARE, Mesh
from tests.train import support

BATCH, EVERY = 2_048, 2
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


def planned(run, mesh, averaged=0.0):
    """Returns the parts planned for lists of the capacity that they have.

    And for lists of that many rows to average.
    """
    workload = workload_of(
        run.config, generated.schema_of(DATA), BATCH // mesh.gpus, dense_us=1.0
    )
    (stack,) = workload.stacks
    sent = mesh.shards * run.spread.router.capacity
    stack = dataclasses.replace(
        stack, distinct=sent / SPARE, averaged=(averaged / SPARE,) * 4
    )
    return memory_of(dataclasses.replace(workload, stacks=(stack,)), mesh)


def test_a_step_holds_the_lists_of_all_replicas():
    run = run_of(8, 1)
    step = run.first_step.lower(run.init(), run.read(run.splits.train, 0))
    memory = step.compile().memory_analysis()
    parts = planned(run, Mesh(8, 1))
    held = sum(parts.values()) - parts["tables"] - parts["dense"]
    assert held == parts["replicas"]
    assert held == pytest.approx(memory.temp_size_in_bytes, rel=0.15)


def test_the_log_is_what_steps_return():
    run = run_of(4, 2, sync="weights", sync_every=EVERY)
    step = run.first_step.lower(run.init(), run.read(run.splits.train, 0))
    _, before, _ = step.out_info
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(before)]
    log = planned(run, Mesh(4, 2))["log"]
    assert log == pytest.approx(EVERY * sum(sizes) / 8)


def test_an_average_holds_the_lists_of_all_groups():
    run = run_of(4, 2, sync="weights", sync_every=EVERY)
    run.spread.router(run.read(run.splits.train, 0))  # gives lists their capacity
    state, length = run.init(), EVERY * 2 * run.spread.router.capacity
    rows = jnp.zeros(8 * length, jnp.int32)
    _, before = row_average.remember(state.table, state.row_state, rows)
    before = jax.device_put(before, run.spread.router.sharding)
    average = run.spread.sync._average
    program = average.lower(length, state.table, state.row_state, before)
    memory = program.compile().memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    tables = jax.tree.leaves((state.table, state.row_state))
    held -= sum(x.addressable_shards[0].data.nbytes for x in tables)
    parts = planned(run, Mesh(4, 2), averaged=length)
    assert parts["replicas"] == pytest.approx(held, rel=0.05)
