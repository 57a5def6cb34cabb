"""A step over a mesh equals that of one device; all of it on eight CPU devices."""

import dataclasses
import functools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.data import Position
from loka_jax.ops.row_order import Order, places_of
from loka_jax.train import build as build_lib
from loka_jax.train import metrics
from loka_jax.train.checkpoints.row_layout import _reordered
from loka_jax.train.evaluation import evaluate
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.state import TrainState
from tests.support import train as support
from tests.support.train import digest

MESHES = ((1, 8), (2, 4), (4, 2), (8, 1))
SIZE = 128  # FP8 takes multiples of 16 examples of a device
DATA = dataclasses.replace(support.DATA, examples=512)
ROWS = sum(DATA.rows)
ORDER = Order(ROWS, 256)
PLACES = places_of(np.arange(ROWS), ORDER)
COUNTERS = ("step", "skipped", "skipped_in_a_row", "bad_ids")
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@functools.cache
def run_of(replicas=1, shards=1, wire="f32", data=DATA):
    """A run of a small model; over one device by default."""
    config = support.config(batch_size=SIZE, data=data)
    config = dataclasses.replace(
        config,
        model=config.model.clone(dropout_rate=0.0),
        mesh=MeshConfig(
            replicas=replicas, shards=shards, wire_rows=wire, wire_gradients=wire
        ),
    )
    return build_lib.build(config, None, lambda line: None)


def batch_of(step=0, padding=0):
    batch = run_of().splits.train.batch(Position(0, step, 0), SIZE, shuffle=True)
    batch = jax.tree.map(np.array, batch)
    batch.weights[SIZE - padding :] = 0
    return batch


def warm():
    """The parts of one device's state after two steps, on the host.

    A copy: a step that is given them may write its result in their place.
    """
    return jax.tree.map(np.copy, _warm())


@functools.cache
def _warm():
    run = run_of()
    state = run.init()
    for step in range(2):
        state = run.first_step(state, batch_of(step))
    return jax.device_get(vars(state))


def alone(parts):
    return TrainState(**jax.tree.map(jnp.asarray, parts))


def spread(run, parts):
    """Returns the state of one device on the devices of a run.

    Its rows and their optimizer's state in the order of virtual shards.
    """
    placed = {
        name: jax.tree.map(lambda x: _reordered(x, Order(ROWS, 1), ORDER), parts[name])
        for name in ("table", "row_state")
    }
    return TrainState(
        **jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding),
            parts | placed,
            run.template(),
        )
    )


def gathered(state):
    """Returns the parts of a state over devices as those of one, on the host."""
    parts = jax.device_get(vars(state))
    for name in ("table", "row_state"):
        parts[name] = jax.tree.map(lambda x: x[PLACES], parts[name])
    return parts


@functools.cache
def stepped(replicas, shards):
    """The state after a step of a mesh."""
    run = run_of(replicas, shards)
    return run.step(spread(run, warm()), batch_of(2, padding=19))


@functools.cache
def stepped_alone():
    """The parts of the state after that step of one device."""
    return jax.device_get(vars(run_of().step(alone(warm()), batch_of(2, padding=19))))


@pytest.mark.parametrize("replicas, shards", MESHES)
def test_a_step_is_that_of_one_device(replicas, shards):
    want, found = stepped_alone(), gathered(stepped(replicas, shards))
    assert digest(want["table"]) != digest(warm()["table"])
    for name in ("table", "params"):
        chex.assert_trees_all_close(found[name], want[name], rtol=0, atol=1e-6)
    chex.assert_trees_all_close(found["row_state"], want["row_state"], rtol=1e-5)
    chex.assert_trees_all_equal(found["fp8"], want["fp8"])
    np.testing.assert_allclose(found["grad_norm"], want["grad_norm"], rtol=1e-5)
    for name in COUNTERS:
        assert found[name] == want[name], name
    a, b = (metrics.compute(parts["metrics"]) for parts in (found, want))
    assert a["count"] == b["count"]
    assert a["logloss"] == pytest.approx(b["logloss"], rel=1e-6)


@pytest.mark.parametrize("replicas, shards", MESHES)
def test_replicas_are_equal_bit_for_bit(replicas, shards):
    for leaf in jax.tree.leaves(stepped(replicas, shards)):
        by_index: dict[str, np.ndarray] = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            first = by_index.setdefault(str(shard.index), data)
            np.testing.assert_array_equal(data, first)
        of_rows = leaf.shape[:1] == (ORDER.places,)
        assert len(by_index) == (shards if of_rows else 1)


def collectives(text):
    """Yields kind, dtype, elements and axes of each collective of a step."""
    kinds = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    for line in text.splitlines():
        if found := re.search(rf"= (.*) ({kinds})(?:-start)?\(", line):
            axes = re.search(r"replica_groups=mesh\[.*?\] \{(.*?)\}", line)
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", found[1]):
                size = math.prod(int(d) for d in dims.split(",") if d)
                yield found[2], dtype, size, axes and axes[1]


def test_the_compiled_step_says_what_travels():
    rows = 20_000  # so that a shard is larger than all that is exchanged
    data = dataclasses.replace(DATA, rows=(rows, 10, 5, 4))
    run = run_of(2, 4, wire="bf16", data=data)
    step = run.step.lower(run.init(), batch_of())
    text = step.compile().as_text()
    found = list(collectives(text))
    assert {kind for kind, *_ in found} == {"all-to-all", "all-gather", "all-reduce"}
    for kind, dtype, size, axes in found:
        assert size < rows // 4 * 16
        match kind:
            case "all-to-all":
                assert (axes, dtype) == ("'shard'", "u16")
            case "all-gather":  # row numbers and their gradients
                assert axes == "'replica'" and dtype in ("s32", "u16")
    # Rows with the ids of a coming batch, gradients of rows; one sum, one maximum.
    for kind in ("all-to-all", "all-reduce"):
        assert len(re.findall(rf" {kind}(?:-start)?\(", text)) == 2


def test_a_list_that_does_not_fit_skips_the_step():
    run = run_of(2, 4)
    router, (placed, routed) = run.spread.router, run.spread.router(batch_of(2))
    (short,), _ = router._run(int(routed.need) - 1, placed)
    program = run.step._step._program
    state = spread(run, warm())
    before = jax.device_get(vars(state))
    (spent,), _ = router._run(int(routed.need) - 1, placed)
    program = functools.partial(program, vars(state), (placed,), (short,), (placed,))
    after, *_ = jax.device_get(program((spent,)))
    moved = {name for name in before if digest(before[name]) != digest(after[name])}
    assert moved == {"step", "skipped", "skipped_in_a_row"}


def test_a_number_that_is_not_finite_skips_the_step_everywhere():
    run, batch = run_of(2, 4), batch_of(2)
    batch.dense[100, 3] = np.inf
    state = spread(run, warm())
    before = jax.device_get(vars(state))
    after = run.step(state, batch)
    for shard in after.skipped.addressable_shards:
        assert int(shard.data) == int(before["skipped"]) + 1
    after = jax.device_get(vars(after))
    moved = {name for name in before if digest(before[name]) != digest(after[name])}
    assert moved == {"step", "skipped", "skipped_in_a_row"}


def test_an_evaluation_is_that_of_one_device():
    run, one = run_of(2, 4), run_of()
    data = one.splits.valid
    want = evaluate(one, alone(warm()), data)
    found = evaluate(run, spread(run, warm()), data)
    real = want.weights > 0
    np.testing.assert_allclose(found.logits[real], want.logits[real], rtol=1e-5)
    assert found.values["ne"] == pytest.approx(want.values["ne"], rel=1e-6)
    assert found.values["count"] == want.values["count"]


def test_initial_states_are_those_of_one_device():
    found, want = gathered(run_of(2, 4).init()), jax.device_get(vars(run_of().init()))
    tables = found.pop("table"), want.pop("table")
    np.testing.assert_allclose(*tables, rtol=2.0**-22)
    chex.assert_trees_all_equal(found, want)


def test_without_a_mesh_nothing_knows_of_one():
    step = run_of().step

    def parts_after(parts, batch):
        return vars(step._step(TrainState(**parts), batch))

    text = jax.jit(parts_after).lower(warm(), batch_of()).as_text()
    assert not re.search("sharding|mesh|all_reduce|all_to_all|manual", text)
