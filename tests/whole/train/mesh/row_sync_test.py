"""Groups that update rows alone, against their equations, on eight CPU devices."""

import dataclasses
import functools
import io
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

from loka_jax.ops import row_average
from loka_jax.ops.embedding import BAD_ID
from loka_jax.optim import LaggedRowwiseAdagrad, OptimConfig, RowwiseAdagrad, Sgd
from loka_jax.saved_format import CHECKPOINTS
from loka_jax.train import build as build_lib
from loka_jax.train import session
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.row_layout import read_state
from loka_jax.train.config import EmbeddingConfig, RunOptions
from loka_jax.train.mesh.devices import AXES, REPLICA, SHARD, MeshConfig, mesh_of
from loka_jax.train.mesh.row_sync import update_alone
from loka_jax.train.step import RowUpdate
from tests.support import train as support
from tests.support.train import digest
from tests.whole.train.mesh import mesh_step_test as plain

ROWS, DIM, LENGTH, LR = 20, 4, 24, 0.1  # rows of a shard; updates of a device
STEPS = 3
ADAGRAD = RowwiseAdagrad(eps=1e-3, c=2.0)
LAGGED = LaggedRowwiseAdagrad(eps=1e-3, c=4.0)
CASES = [
    *((ADAGRAD, *mesh, every) for mesh in ((2, 4), (4, 2), (8, 1)) for every in (1, 3)),
    *((LAGGED, 4, 2, every) for every in (1, 3)),
    (Sgd(), 8, 1, 1),
]
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@functools.cache
def updates(groups, shards):
    """Rows and gradients of each step, group and shard."""
    rng = np.random.default_rng(groups)
    shape = STEPS, groups, shards, LENGTH
    # No group has rows 16 and above; rows are there twice, too.
    rows = rng.integers(0, 16, shape).astype(np.int32)
    rows[..., ::5] = BAD_ID
    return rows, rng.normal(size=(*shape, DIM)).astype(np.float32)


@functools.cache
def tables(shards):
    return np.random.default_rng(0).normal(size=(shards * ROWS, DIM)).astype(np.float32)


@functools.cache
def trained(groups, shards, optimizer, every):
    """Tables and states of every device after all steps, [M, L, rows]."""
    mesh = mesh_of(MeshConfig(replicas=groups, shards=shards), groups * shards, 1)
    config = MeshConfig(wire_gradients="f32", sync="weights", sync_every=every)
    row_update = RowUpdate(optimizer, optax.constant_schedule(LR), 0.0)

    def part(table, rows, grads):
        how = row_update, config, jnp.asarray(True)

        def one(state, touched):
            table, row_state, before = update_alone(*state, touched, how, LR)
            return (table, row_state), before

        state, log = jax.lax.scan(
            one, (table, optimizer.init(table)), (rows[:, 0, 0], grads[:, 0, 0])
        )
        if every > 1:
            log = [jax.tree.map(lambda x, k=k: x[k], log) for k in range(STEPS)]
            before, _ = row_average.distinct(log, len(table))
            state = row_average.average(*state, before, "f32", REPLICA)
        return jax.tree.map(lambda x: x[None, None], state)

    by_device = P(None, REPLICA, SHARD)
    step = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(P(SHARD), by_device, by_device),
        out_specs=P(*AXES),
        check_vma=False,
    )
    return jax.device_get(jax.jit(step)(tables(shards), *updates(groups, shards)))


def reference(groups, shards, optimizer, every):
    """The same by the equations, in float64."""
    rows, grads = updates(groups, shards)
    w = np.broadcast_to(
        tables(shards).astype(np.float64).reshape(shards, ROWS, DIM),
        (groups, shards, ROWS, DIM),
    ).copy()
    v = np.zeros(w.shape[:-1])
    for step in range(STEPS):
        for at in np.ndindex(groups, shards):
            is_row = rows[step][at] != BAD_ID
            g = np.zeros((ROWS, DIM))
            np.add.at(g, rows[step][at][is_row], grads[step][at][is_row])
            g *= groups
            squares = np.mean(g**2, axis=-1)
            used = v[at] + squares
            if isinstance(optimizer, LaggedRowwiseAdagrad):
                used = np.maximum(v[at], squares)
            v[at] += squares
            if isinstance(optimizer, Sgd):
                w[at] -= LR * g
            else:
                w[at] -= LR * g / (np.sqrt(used / optimizer.c) + 1e-3)[:, None]
        if (step + 1) % every == 0:
            w[:], v[:] = w.mean(axis=0), v.mean(axis=0)
    return w, v


@pytest.mark.parametrize("optimizer, groups, shards, every", CASES)
def test_rows_follow_the_equations(optimizer, groups, shards, every):
    table, state = trained(groups, shards, optimizer, every)
    w, v = reference(groups, shards, optimizer, every)
    # Three steps, each of sums of at most 8 x 24 products of numbers below 40.
    np.testing.assert_allclose(table, w, rtol=1e-4, atol=1e-5)
    if not isinstance(optimizer, Sgd):
        np.testing.assert_allclose(state.sum_of_squares, v, rtol=1e-5)
    for replica in table[1:]:
        np.testing.assert_array_equal(replica, table[0])
    untouched = np.s_[:, :, 16:]
    start = tables(shards).reshape(1, shards, ROWS, DIM)[untouched]
    np.testing.assert_array_equal(table[:1][untouched], start)


def test_changes_of_8_bits_leave_replicas_equal():
    config = MeshConfig(replicas=4, shards=2)
    rows, grads = updates(4, 2)

    def part(table, rows, grads):
        (table, _), before = row_average.remember(table, (), rows[0, 0])
        table = table.at[rows[0, 0]].add(grads[0, 0], mode="drop")
        before, _ = row_average.distinct([before], len(table))
        table, _ = row_average.average(table, (), before, "int8", REPLICA)
        return table[None, None]

    step = jax.shard_map(
        part,
        mesh=mesh_of(config, 8, 1),
        in_specs=(P(SHARD), P(*AXES), P(*AXES)),
        out_specs=P(*AXES),
        check_vma=False,
    )
    found = np.asarray(jax.jit(step)(tables(2), rows[0], grads[0]))
    assert (found[0] != tables(2).reshape(2, ROWS, DIM)).any()
    for replica in found[1:]:
        np.testing.assert_array_equal(replica, found[0])


def test_the_oldest_entry_of_each_row_is_kept():
    def at(rows, value):
        rows = jnp.asarray(rows, jnp.int32)
        table = jnp.full((len(rows), DIM), value, jnp.float32)
        return row_average.Remembered(rows, table, jnp.full(len(rows), value))

    log = [at([7, BAD_ID, 3], 1.0), at([3, 5, 7], 2.0), at([2, BAD_ID, 2], 3.0)]
    found, count = row_average.distinct(log, num_rows=8)
    assert int(count) == 4 and len(found.rows) == 8
    np.testing.assert_array_equal(found.rows[:4], [2, 3, 5, 7])
    np.testing.assert_array_equal(found.state[:4], [3.0, 1.0, 2.0, 1.0])
    np.testing.assert_array_equal(found.table[:4, 0], found.state[:4])
    assert (found.rows[4:] == BAD_ID).all()


@functools.cache
def run_of(groups, shards, *, rows: Any = "sgd", wire="f32", sync="weights", every=1):
    """A run of the small model."""
    how: Any = dict(wire_rows=wire, wire_gradients=wire, sync=sync, sync_every=every)
    config = support.config(batch_size=plain.SIZE, data=plain.DATA)
    config = dataclasses.replace(
        config,
        model=config.model.clone(dropout_rate=0.0),
        optim=OptimConfig(lr=0.01, rows=rows, rows_lr=0.1),
        mesh=MeshConfig(replicas=groups, shards=shards, **how),
    )
    return build_lib.build(config, None, lambda line: None)


def replicas_of(state):
    """The tables of each replica, on the host."""
    by_index = {}
    for shard in state.table.addressable_shards:
        by_index.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return list(zip(*by_index.values(), strict=True))


def are_equal(state):
    first, *others = map(digest, replicas_of(state))
    return all(other == first for other in others)


def test_by_sgd_a_step_is_that_of_gradients():
    found, want = (
        jax.device_get(vars(run.first_step(run.init(), plain.batch_of(padding=19))))
        for run in (run_of(4, 2), run_of(4, 2, sync="gradients"))
    )
    np.testing.assert_allclose(found.pop("table"), want.pop("table"), atol=1e-6)
    chex.assert_trees_all_equal(found, want)


def test_groups_differ_until_they_are_averaged():
    run = run_of(4, 2, every=3, rows="rowwise_adagrad")
    start = run.init()
    states = {}
    state = run.init()
    for step in range(1, 4):
        state = run.first_step(state, plain.batch_of(step))
        states[step] = are_equal(state)
    assert states == {1: False, 2: False, 3: True}
    assert digest(jax.device_get(state.table)) != digest(jax.device_get(start.table))

    # Earlier, if something is to read them; a state of its own begins anew.
    state = run.first_step(run.init(), plain.batch_of(1))
    early = run.synced(state)
    assert are_equal(early) and run.synced(early) is early
    state = run.first_step(run.init(), plain.batch_of(1))
    again = run.first_step(run.init(), plain.batch_of(1))
    assert digest(jax.device_get(vars(run.synced(again)))) == digest(
        jax.device_get(vars(early))
    )


def test_one_group_runs_the_program_of_gradients():
    texts = set()
    for sync, every in (("gradients", 1), ("weights", 4)):
        run = run_of(1, 8, sync=sync, every=every)
        lowered = run.first_step.lower(run.init(), plain.batch_of())
        texts.add(lowered.as_text())
    assert len(texts) == 1


def test_only_touched_rows_travel():
    rows = 20_000  # so that a shard is larger than all that is exchanged
    data = dataclasses.replace(plain.DATA, rows=(rows, 10, 5, 4))
    config = run_of(2, 4, wire="bf16", rows="rowwise_adagrad").config
    for every in (1, 2):
        mesh = dataclasses.replace(config.mesh, sync_every=every)
        run = build_lib.build(
            dataclasses.replace(config, data=data, mesh=mesh), None, lambda line: None
        )
        state = run.init()
        programs = [run.first_step.lower(state, plain.batch_of())]
        if every > 1:
            programs.append(lowered_average(run, state))
        texts = [program.compile().as_text() for program in programs]
        part = state.table.addressable_shards[0].data.shape
        for text in texts:  # nor are tables copied
            assert f"f32[{part[0]},{part[1]}]{{1,0}} copy(" not in text
        found = [list(plain.collectives(text)) for text in texts]
        for kind, dtype, size, axes in sum(found, []):
            assert size < rows // 4 * 16
            match kind:
                case "all-to-all":
                    assert (axes, dtype) == ("'shard'", "u16")
                case "all-gather":  # row numbers, changes of rows and of their sums
                    assert axes == "'replica'" and dtype in ("s32", "u16", "f32")
        gathered = [sorted(d for k, d, *_ in x if k == "all-gather") for x in found]
        travels = ["f32", "s32", "u16"]
        assert gathered == ([travels] if every == 1 else [[], travels])
        assert sum(kind == "all-reduce" for kind, *_ in found[0]) == 2


def lowered_average(run, state):
    """The program that averages lists of 64 rows, as it is lowered."""
    rows = jnp.zeros(run.spread.mesh.size * 64, jnp.int32)
    _, before = row_average.remember(state.table, state.row_state, rows)
    average = run.spread.sync._average
    return average.lower(64, state.table, state.row_state, before)


def test_a_checkpoint_is_the_average_of_all_groups(tmp_path):
    config = run_of(4, 2, every=3, rows="rowwise_adagrad").config
    loop = dataclasses.replace(config.loop, max_steps=4, save_every=4, eval_every=4)
    options = RunOptions(workdir=tmp_path)
    config = dataclasses.replace(config, loop=loop, run=options)
    output = io.StringIO()
    done = session.train(config, [], Console(file=output))
    assert "Devices: 8 of 8, in 4 groups of 2.\n" in output.getvalue()
    assert done.state is not None and are_equal(done.state)
    with Checkpoints(tmp_path / CHECKPOINTS, keep=1) as checkpoints:
        saved = checkpoints.newest()
        assert saved is not None and saved.step == 4
        one = run_of(1, 1, sync="gradients", rows="rowwise_adagrad")
        found = read_state(checkpoints, saved, one.template(), one.layout)
    want = plain.gathered(done.state)
    for name in ("table", "row_state"):
        chex.assert_trees_all_equal(found[name], want[name])


@pytest.mark.parametrize(
    "mesh, optim, reason",
    [
        (dict(sync_every=2), {}, "--mesh.sync-every 2 needs --mesh.sync weights"),
        (dict(sync="weights", sync_every=0), {}, "--mesh.sync-every 0"),
        (dict(sync="weights"), dict(rows="adam"), "--optim.rows rowwise_adagrad"),
        (dict(sync="weights"), dict(rows_l2=0.1), "--optim.rows-l2 0.1 changes every"),
    ],
)
def test_what_has_no_average_is_refused(mesh, optim, reason):
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(
            support.config(), mesh=MeshConfig(**mesh), optim=OptimConfig(**optim)
        )


def test_averages_of_bfloat16_rows_are_refused():
    tables = EmbeddingConfig(dtype="bf16")
    with pytest.raises(ValueError, match="--embedding.dtype f32"):
        dataclasses.replace(
            support.config(), mesh=MeshConfig(sync="weights"), embedding=tables
        )
