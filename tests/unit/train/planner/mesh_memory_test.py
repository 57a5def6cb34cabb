"""Memory and wire that are planned, against programs compiled for eight CPU devices.

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
from loka_jax.train.planner.mesh_plan import Rates, estimate
from loka_jax.train.planner.mesh_workload import workload_of
from loka_jax.train.planner.step_sizes import SPARE, Mesh
from tests.support import train as support
from tests.whole.train.mesh.mesh_step_test import collectives

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
    """Returns what is planned for lists of the capacity that they have.

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
    return estimate(dataclasses.replace(workload, stacks=(stack,)), mesh, Rates())


def gathered(program):
    """Returns the bytes that a device gathers of all replicas."""
    sizes = {"s32": 4, "u16": 2, "f32": 4}
    found = [x for x in collectives(program.as_text()) if x[0] == "all-gather"]
    assert {axes for *_, axes in found} == {"'replica'"}
    return sum(sizes[dtype] * count for _, dtype, count, _ in found)


@functools.cache
def compiled_step():
    run = run_of(8, 1)
    return run.first_step.lower(run.init(), run.read(run.splits.train, 0)).compile()


def test_a_step_holds_the_lists_of_all_replicas():
    memory = compiled_step().memory_analysis()
    parts = planned(run_of(8, 1), Mesh(8, 1)).memory
    held = sum(parts.values()) - parts["tables"] - parts["dense"]
    assert held == parts["replicas"]
    assert held == pytest.approx(memory.temp_size_in_bytes, rel=0.15)


def test_replicas_gather_what_is_planned():
    wire = planned(run_of(8, 1), Mesh(8, 1)).wire["replicas"]
    assert wire == pytest.approx(gathered(compiled_step()) * 7 / 8)


def test_the_log_is_what_steps_return():
    run = run_of(4, 2, sync="weights", sync_every=EVERY)
    step = run.first_step.lower(run.init(), run.read(run.splits.train, 0))
    _, before, _ = step.out_info
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(before)]
    log = planned(run, Mesh(4, 2)).memory["log"]
    assert log == pytest.approx(EVERY * sum(sizes) / 8)


def test_an_average_holds_and_sends_the_lists_of_all_groups():
    run = run_of(4, 2, sync="weights", sync_every=EVERY)
    run.spread.router(run.read(run.splits.train, 0))  # gives lists their capacity
    state, length = run.init(), EVERY * 2 * run.spread.router.capacity
    rows = jnp.zeros(8 * length, jnp.int32)
    _, before = row_average.remember(state.table, state.row_state, rows)
    before = jax.device_put(before, run.spread.router.sharding)
    average = run.spread.sync._average
    lowered = average.lower(length, state.table, state.row_state, before)
    program = lowered.compile()
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    tables = jax.tree.leaves((state.table, state.row_state))
    held -= sum(x.addressable_shards[0].data.nbytes for x in tables)
    plan = planned(run, Mesh(4, 2), averaged=length)
    assert plan.memory["replicas"] == pytest.approx(held, rel=0.05)
    # Of a step, a part of what travels once in several.
    wire = plan.wire["replicas"] * EVERY
    assert wire == pytest.approx(gathered(program) * 3 / 4)
