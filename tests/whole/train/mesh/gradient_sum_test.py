"""Dense gradients that travel in fewer bits: error, equal bits, faults, resume, choice.

All of it on eight CPU devices.
"""

import dataclasses
import functools
import io
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from experiments.cli import parse
from loka_jax.dispatch import gradient_wire
from loka_jax.packed import Packing
from loka_jax.train import build as build_lib
from loka_jax.train import metrics
from loka_jax.train.build_in_turn import built_in_turn
from loka_jax.train.gradients import Gradients
from loka_jax.train.logs.progress import print_plan
from loka_jax.train.mesh import mesh_step
from loka_jax.train.mesh.devices import AXES, MeshConfig
from loka_jax.train.mesh.gradient_sum import CollectivesConfig
from loka_jax.train.processes.group import Processes
from tests.support import train as support
from tests.support.train import digest
from tests.whole.train.mesh import mesh_step_test
from tests.whole.train.mesh.mesh_step_test import (
    SIZE,
    batch_of,
    collectives,
    gathered,
    warm,
)

BLOCK = 128
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def config_of(gradients, replicas=2, shards=4, workdir=None, **options):
    config = support.config(
        workdir, batch_size=SIZE, data=mesh_step_test.DATA, **options
    )
    return dataclasses.replace(
        config,
        model=config.model.clone(dropout_rate=0.0),
        mesh=MeshConfig(replicas=replicas, shards=shards),
        collectives=CollectivesConfig(gradients=gradients),
    )


@functools.cache
def run_of(gradients):
    return build_lib.build(config_of(gradients), None, lambda line: None)


@functools.cache
def stepped(gradients):
    """The state after a step in which all devices see the same examples."""
    batch = batch_of(2)
    same = jax.tree.map(
        lambda x: np.tile(x[: SIZE // 8], (8, *[1] * (x.ndim - 1))), batch
    )
    run = run_of(gradients)
    return run.step(mesh_step_test.spread(run, warm()), same)


def test_bytes_of_gradients_travel_and_the_rest_is_summed_exactly():
    run = run_of("int8")
    step = run.step.lower(run.init(), batch_of())
    found = list(collectives(step.compile().as_text()))
    of_rows = {"all-to-all": "'shard'", "all-gather": "'replica'"}
    sums = [one for one in found if one[3] != of_rows.get(one[0])]
    assert {kind for kind, *_ in sums} == {"all-to-all", "all-gather", "all-reduce"}
    sizes = [x.size for x in jax.tree.leaves(run.template()["params"])]
    for kind, dtype, size, _ in sums:
        if kind == "all-reduce":
            assert dtype == "f32" and size < sum(sizes)
        else:
            assert dtype == "u8"
    sent = sum(size for kind, _, size, _ in sums if kind == "all-to-all")
    filled = sum(-(-size // BLOCK) * BLOCK for size in sizes)  # each begins a block
    assert sent == 8 * Packing(filled, 8, BLOCK).row_bytes
    assert sum(kind == "all-reduce" for kind, *_ in sums) == 2


def mean_gradients(state):
    (adam,) = [
        x
        for x in jax.tree.leaves(
            state.opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)
        )
        if isinstance(x, optax.ScaleByAdamState)
    ]
    return jax.device_get(adam.mu)


def amaxes(x):
    """Returns for each value the largest magnitude of its block."""
    blocks = np.pad(np.abs(x.ravel()), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    return np.repeat(blocks.max(1), BLOCK)[: x.size].reshape(x.shape)


def test_gradients_are_off_by_two_roundings_at_most():
    """Each of eight devices rounds an eighth of the sum, and then the sum is rounded.

    By half a step of a block's amax / 127 each time. Adam's first moment moves by a
    tenth of the gradient, so that its change is the gradient.
    """
    before = jax.tree.leaves(
        mean_gradients(SimpleNamespace(opt_state=warm()["opt_state"]))
    )
    exact, found = (
        jax.tree.leaves(mean_gradients(stepped(wire))) for wire in ("f32", "int8")
    )
    errors = []
    for old, want, got in zip(before, exact, found, strict=True):
        gradient, error = (want - 0.9 * old) / 0.1, np.abs(got - want) / 0.1
        rounding = 1e-6 * np.abs(old).max() / 0.1  # of the moments themselves
        assert np.all(error <= 1.01 * amaxes(gradient) / 127 + rounding)
        errors.append(error.max())
    assert max(errors) > 0
    np.testing.assert_allclose(
        stepped("int8").grad_norm, stepped("f32").grad_norm, rtol=0.01
    )


def test_what_is_no_gradient_is_that_of_float32():
    found, want = gathered(stepped("int8")), gathered(stepped("f32"))
    for name in ("step", "skipped", "skipped_in_a_row", "bad_ids", "metrics", "fp8"):
        chex.assert_trees_all_equal(found[name], want[name])
    assert digest(found["params"]) != digest(want["params"])


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_devices_end_with_equal_bits(wire):
    for leaf in jax.tree.leaves(stepped(wire)):
        by_index = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            first = by_index.setdefault(str(shard.index), data)
            np.testing.assert_array_equal(data, first)


def merged(params, wire):
    """Returns what all devices have together, and each of them, [8, ...]."""
    mesh = run_of("int8").spread.mesh
    batch = jax.tree.map(jnp.asarray, batch_of())

    def merge(params):
        params = jax.tree.map(lambda x: x[0], params)
        grads = Gradients(params, jnp.zeros((2, 2)), {}, {})
        parts = jnp.ones(()), {}, metrics.init(), jnp.ones(())
        out = mesh_step._merge(parts, grads, batch, wire)
        return jax.tree.map(lambda x: x[None], (out.params, out.loss))

    return jax.jit(
        jax.shard_map(
            merge, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False
        )
    )(params)


@pytest.mark.parametrize("wire", ["f32", "bf16", "int8"])
def test_a_gradient_of_one_device_that_is_not_finite_is_seen_on_all(wire):
    params = {"a": np.ones((8, 3, 50), np.float32), "b": np.ones((8, 5), np.float32)}
    params["a"][5, 1, 2] = np.inf
    found, loss = merged(params, wire)
    assert not np.isfinite(np.asarray(found["a"])).all((1, 2)).any()
    np.testing.assert_array_equal(found["b"], np.full((8, 5), 8))
    np.testing.assert_array_equal(loss, np.full(8, 8))


def test_a_step_that_is_not_finite_changes_counters_only():
    run, batch = run_of("int8"), batch_of(2)
    batch.dense[100, 3] = np.inf
    state = mesh_step_test.spread(run, warm())
    before = jax.device_get(vars(state))
    after = jax.device_get(vars(run.step(state, batch)))
    moved = {name for name in before if digest(before[name]) != digest(after[name])}
    assert moved == {"step", "skipped", "skipped_in_a_row"}


def test_a_run_goes_on_with_the_same_bits(tmp_path, monkeypatch):
    support.share_data(monkeypatch)
    monkeypatch.setattr("loka_jax.train.session.write_run_page", lambda path, run: path)
    options = {"max_steps": 4, "save_every": 2, "log_every": 1, "epochs": 2}
    whole = config_of("int8", workdir=tmp_path / "whole", **options)
    assert support.train(whole)[0] == 0
    for more in ({"max_steps": 2}, {"resume": True}):
        part = config_of("int8", workdir=tmp_path / "parts", **options | more)
        assert support.train(part)[0] == 0
    lists = ("list_capacity", "list_climbs")
    found, want = (
        [
            line
            for line in support.without(lists, support.lines(tmp_path / name))
            if line["kind"] == "train"
        ]
        for name in ("parts", "whole")
    )
    assert found == want and len(want) == 4
    summed = support.summary(tmp_path / "whole")["gradients"]
    assert (summed["wire"], summed["reason"]) == ("int8", "as asked")


def printed(run):
    out = io.StringIO()
    print_plan(Console(file=out, width=1000), run.plan, run.plan_notes)
    return out.getvalue()


def test_auto_stays_with_float32_where_nobody_measured_and_says_so():
    run = run_of("auto")
    assert run.summed.wire == "f32"
    note = "MiB, are summed in f32: not measured on 8 x cpu: python experiments/bench/"
    assert note in printed(run)


def test_auto_takes_what_was_measured_to_be_faster(tmp_path, monkeypatch):
    us = {"f32": {"1000": 100.0}, "int8 xla": {"1000": 10.0}}
    table = tmp_path / "table.json"
    host = {"device": "cpu", "devices": 8, "source": "here", "us": us}
    gradient_wire.add(table, host)
    read = functools.partial(gradient_wire.read, table)
    monkeypatch.setattr(gradient_wire, "read", read)
    run = build_lib.build(config_of("auto"), None, lambda line: None)
    params = run.template()["params"]
    num_bytes = 4 * sum(x.size for x in jax.tree.leaves(params))
    assert run.summed == ("int8", run.summed.reason, num_bytes)
    assert "are summed in int8: sums of" in printed(run)
    assert "f32 100, int8 10 us" in run.summed.reason


def test_the_first_process_decides():
    """The second of two, whose own choice would be another one."""
    text = '{"plan": {}, "summed": {"wire": "bf16", "reason": "r", "num_bytes": 3}}'
    own = run_of("int8")

    class Second(Processes):
        def same(self, _):
            return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loka_jax.train.build_in_turn.meet", lambda *_: None)
        run = built_in_turn(Second(1, 2), lambda plan: own, None)
    assert run.summed == ("bf16", "r", 3)


def test_one_device_sums_nothing():
    run = build_lib.build(config_of("int8", 1, 1), None, lambda line: None)
    assert run.summed is None and "gradients" not in printed(run)


def test_other_ways_to_travel_are_refused_in_a_sentence():
    with pytest.raises(ValueError, match="--collectives.gradients.*auto"):
        parse(["--config", "fp8_dlrm_tiny", "--collectives.gradients", "fp4"])


def test_times_that_cannot_be_read_are_refused_with_the_remedy(tmp_path, monkeypatch):
    table = tmp_path / "table.json"
    table.write_text("{}")
    read = functools.partial(gradient_wire.read, table)
    monkeypatch.setattr(gradient_wire, "read", read)
    with pytest.raises(ValueError, match="no table of sums over GPUs.* write a new"):
        build_lib.build(config_of("auto"), None, lambda line: None)
