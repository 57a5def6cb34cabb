"""A step over a mesh equals that of one device, all options on at once.

The devices are virtual, but for lists and several dims, which eight CPU devices train.
"""

import dataclasses
import functools
import re

import chex
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.data import Batch, generated
from loka_jax.data.batch import Bag
from loka_jax.models import Dlrm
from loka_jax.ops.joint_collectives import gather_all, swap
from loka_jax.ops.tables import TableSpec, with_dims
from loka_jax.optim.rows import Adam
from loka_jax.train import build as build_lib
from loka_jax.train import metrics
from loka_jax.train.mesh import routing
from loka_jax.train.mesh.devices import (
    AXES,
    BATCH,
    SHARD,
    CollectivesConfig,
    MeshConfig,
    mesh_of,
    state_specs,
)
from loka_jax.train.mesh.placement import placement_of
from loka_jax.train.mesh.routing import Routing
from loka_jax.train.placement import Placement, one_after_another
from loka_jax.train.state import TrainState, init_state
from loka_jax.train.step import make_eval_step, make_train_step
from loka_jax.train.tables.update import RowUpdate
from tests.support import mesh as support
from tests.support import train
from tests.support.mesh import (
    MODEL,
    OPTIMIZER,
    OPTIONS,
    ROW_UPDATE,
    ROWS,
    TABLES,
    collectives,
    in_order_of_mesh,
    in_order_of_rows,
)

REPLICAS = SHARDS = 2
CAPACITY = 13
CONFIG = MeshConfig(
    replicas=REPLICAS, shards=SHARDS, wire_rows="f32", wire_gradients="f32"
)


@functools.cache
def program():
    """The step, the evaluation and a look at four examples, of all devices."""
    placement = support.placement(CONFIG)
    step = make_train_step(MODEL, placement, OPTIMIZER, ROW_UPDATE, **OPTIONS)
    evaluate = make_eval_step(MODEL, placement)

    def all_of(parts, batch, few, more_need):
        state = TrainState(**parts)
        routes, counts = placement.router.part(CAPACITY, batch)
        asked = routing.lists_asked(routes)
        each = gather_all(counts, AXES)
        routed = routing.routed_batch(routes, swap(asked, SHARD), each)
        more = routed.counts._replace(need=routed.counts.need + more_need)
        given, seen = routed._replace(counts=more), metrics.init_like(state.metrics)
        evaluated = evaluate(state, seen, batch, Routing(routed))
        rows = placement.look_up_alike(MODEL, state, few)
        state, left = step(state, batch, Routing(given, counts, asked))
        assert not jax.tree.leaves(left.before)
        later = routing.routed_batch(routes, left.asked, left.counts)
        return vars(state), routed, later, evaluated, rows

    in_specs = state_specs(), BATCH, P(), P()
    out_specs = state_specs(), routing.SPECS, routing.SPECS, (P(), BATCH), P()
    return support.on_virtual_devices(all_of, REPLICAS, SHARDS, in_specs, out_specs)


def run(batch, more_need=0):
    """Returns the state's parts after a step, in the order of rows, and the rest."""
    few = jax.tree.map(lambda x: x[:4], batch)
    parts = in_order_of_mesh(vars(support.start()), ROWS)
    after, *rest = program()(parts, batch, few, np.int32(more_need))
    return in_order_of_rows(after, ROWS), *rest


@functools.cache
def alone():
    """The same of one device: the state's parts, metrics, logits and rows."""
    batch, step = support.batch_of(), support.step_by_parts(REPLICAS * SHARDS)
    placement = Placement(TABLES)
    evaluate = make_eval_step(MODEL, placement)

    def all_of(state, batch, few):
        evaluated = evaluate(state, metrics.init_like(state.metrics), batch)
        rows = placement.look_up_alike(MODEL, state, few)
        return vars(step(state, batch)), evaluated, rows

    few = jax.tree.map(lambda x: x[:4], batch)
    return jax.device_get(jax.jit(all_of)(support.start(), batch, few))


def test_a_step_an_evaluation_and_a_look_are_those_of_one_device():
    batch, start = support.batch_of(), support.start()
    found, routed, later, (seen, logits), rows = run(batch)
    want, (want_seen, want_logits), want_rows = alone()
    # Sums of at most 64 terms below 10 in another order, scaled by Adam's 1 / 1e-3.
    chex.assert_trees_all_close(found, want, rtol=1e-4, atol=1e-5)
    moved = (want["table"] != np.asarray(start.table)).any(axis=1)
    assert moved.any() and not moved[[*support.PADDING_ROWS]].any()
    assert not want["row_state"].count[[*support.PADDING_ROWS]].any()
    np.testing.assert_allclose(logits, want_logits, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(seen, want_seen, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rows, want_rows)

    chex.assert_trees_all_equal(later, routed)
    weights = batch.weights @ np.isfinite(batch.labels)
    np.testing.assert_allclose(routed.counts.weight, weights, rtol=1e-6)
    assert routed.counts.bad_ids == 1 and 0 < routed.counts.need <= CAPACITY
    full, *_ = run(batch, more_need=CAPACITY - routed.counts.need)
    assert full["skipped"] == start.skipped


def of_infinity(batch):
    batch.dense[20, 3] = np.inf  # an example of one device
    return batch


@pytest.mark.parametrize(
    "spoil, more_need",
    [(lambda batch: batch, CAPACITY), (of_infinity, 0)],
    ids=["a list that does not fit", "a number that is not finite"],
)
def test_a_step_is_skipped_on_all_devices(spoil, more_need):
    before = vars(support.start())
    after, *_ = run(spoil(support.batch_of()), more_need)
    counters = ("step", "skipped", "skipped_in_a_row")
    assert [after[name] - before[name] for name in counters] == [1, 1, 1]
    assert after["bad_ids"] == before["bad_ids"] + 1
    for name in before.keys() - {*counters, "bad_ids"}:
        chex.assert_trees_all_equal(after[name], before[name])


eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
EIGHT = dataclasses.replace(CONFIG, shards=4)
ADAM = Adam(eps=1e-3)
# Two fields with one id, then two with lists.
MIXED = with_dims(TableSpec((7, 5, 6, 4), 8, pooling=("mean", "sum")), (8, 4, 3, 4))
DLRM = Dlrm(bottom_mlp=(8,), top_mlp=(8,), recipe="f32")


def batch_with_lists():
    rng = np.random.default_rng(0)
    lists = [rng.integers(-1, rows, (32, 3)).astype(np.int32) for rows in (6, 4)]
    return Batch(
        dense=rng.normal(size=(32, 3)).astype(np.float32),
        ids=rng.integers(0, (7, 5), (32, 2)).astype(np.int32),
        labels=rng.integers(0, 2, 32).astype(np.float32),
        weights=np.float32(np.arange(32) < 27),
        bags=tuple(Bag(x, None) for x in lists),
    )


def by_stack(move, parts):
    """Returns the parts of a state with the tables of each stack in another order."""
    names = "table", "row_state"
    stacks = zip(MIXED.stacks, *(parts[name] for name in names), strict=True)
    moved = [
        move(dict(zip(names, stack, strict=True)), spec.total_rows)
        for spec, *stack in stacks
    ]
    return parts | {name: tuple(part[name] for part in moved) for name in names}


@eight
@pytest.mark.parametrize("replicas, shards", [(1, 8), (2, 4), (8, 1)])
def test_a_step_of_eight_devices_has_lists_and_several_dims(replicas, shards):
    config = dataclasses.replace(CONFIG, replicas=replicas, shards=shards)
    update = RowUpdate(ADAM, optax.constant_schedule(0.1), 0.0)
    sizes = dict(num_dense=3, init_stddev=0.5)
    made = dict(model=DLRM, tables=MIXED, optimizer=optax.sgd(0.1), row_optimizer=ADAM)
    state = jax.jit(functools.partial(init_state, **sizes, **made))(jax.random.key(0))
    placement = placement_of(mesh_of(config, 32, 2), config, MIXED)
    before = by_stack(in_order_of_mesh, jax.device_get(vars(state)))
    places = jax.tree.map(lambda x: x.sharding, placement.template(before))
    before = jax.device_put(before, places)
    batch = batch_with_lists()
    alone, step = (
        make_train_step(DLRM, place, optax.sgd(0.1), update, microbatches=2)
        for place in (Placement(MIXED), placement)
    )
    want = jax.jit(one_after_another(alone))(state, batch)
    after = placement.train_program(step, 1, {})(TrainState(**before), batch)
    support.assert_devices_agree(after)
    found = by_stack(in_order_of_rows, jax.device_get(vars(after)))
    chex.assert_trees_all_close(found, jax.device_get(vars(want)), rtol=1e-3, atol=1e-5)
    assert found["step"] == 1 and not found["skipped"]


@eight
def test_the_compiled_step_says_what_travels():
    rows, size = 20_000, 256  # so that a shard is larger than all that is exchanged
    data = dataclasses.replace(train.DATA, examples=size, rows=(rows, 10, 5, 4))
    config = train.config(batch_size=size, microbatches=2, data=data)
    mesh = dataclasses.replace(EIGHT, wire_rows="bf16", wire_gradients="bf16")
    how = dict(mesh=mesh, collectives=CollectivesConfig(gradients="int8"))
    run = build_lib.build(dataclasses.replace(config, **how))
    split = run.splits.train
    where = data, split._world, size, np.zeros(5, np.uint32), run.placement.sharding
    made = generated._make.lower(*where).compile().as_text()
    assert not list(collectives(made))  # each device makes its own examples
    step, batch = run.train_step(scales_initialized=True), run.read(split, 0)
    text = step.lower(run.init(), batch).compile().as_text()
    found = list(collectives(text))
    assert {kind for kind, *_ in found} == {"all-to-all", "all-gather", "all-reduce"}
    for kind, dtype, count, axes in found:
        assert count < rows // 4 * 16
        match kind:
            case "all-to-all" if dtype != "u8":
                assert (axes, dtype) == ("'shard'", "u16")
            case "all-gather" if dtype != "u8":  # row numbers and their gradients
                assert axes == "'replica'" and dtype in ("s32", "u16")
    of_gradients = {kind for kind, dtype, *_ in found if dtype == "u8"}
    assert of_gradients == {"all-gather", "all-to-all"}
    # Rows with the ids of a coming batch, gradients of rows; one sum, one maximum.
    for kind, count in (("all-to-all", 3), ("all-reduce", 2)):
        assert len(re.findall(rf" {kind}(?:-start)?\(", text)) == count
