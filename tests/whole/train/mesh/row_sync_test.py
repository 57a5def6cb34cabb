"""Runs over groups of eight CPU devices that update rows alone, or in bfloat16."""

import dataclasses
import io

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from loka_jax.saved_format import CHECKPOINTS
from loka_jax.train import build as build_lib
from loka_jax.train import session
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.row_layout import read_state
from loka_jax.train.config import RunOptions
from loka_jax.train.mesh.devices import CollectivesConfig, MeshConfig
from loka_jax.train.state import TrainState
from tests.support import train as support
from tests.support.mesh import in_order_of_rows
from tests.support.train import digest

SIZE = 128
DATA = dataclasses.replace(support.DATA, examples=4 * SIZE)
ROWS = sum(DATA.rows)
EXACT = dict(wire_rows="f32", wire_gradients="f32")
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def are_equal(state):
    """Returns whether all replicas have the same tables."""
    by_index = {}
    for shard in state.table.addressable_shards:
        by_index.setdefault(str(shard.index), set()).add(digest(shard.data))
    return all(len(found) == 1 for found in by_index.values())


def run_of(groups, shards, dtype="f32", gradients="f32", **wire):
    """A run of the small model."""
    config = support.config(batch_size=SIZE, data=DATA)
    config = dataclasses.replace(
        config,
        model=config.model.clone(dropout_rate=0.0),
        embedding=dataclasses.replace(config.embedding, dtype=dtype),
        optim=dataclasses.replace(config.optim, rows="rowwise_adagrad"),
        mesh=MeshConfig(replicas=groups, shards=shards, **EXACT | wire),
        collectives=CollectivesConfig(gradients=gradients),
    )
    return build_lib.build(config, None, lambda line: None)


def trained(config):
    """Returns a session's result, and what it has printed."""
    output = io.StringIO()
    return session.train(config, [], Console(file=output, width=200)), output.getvalue()


def test_groups_differ_until_they_are_averaged():
    run = run_of(4, 2, sync="weights", sync_every=3)
    states, state = {}, run.init()
    for step in range(1, 4):
        state = run.train_step()(state, run.read(run.splits.train, step))
        states[step] = are_equal(state)
    assert states == {1: False, 2: False, 3: True}
    # Earlier, if something is to read them.
    batch = run.read(run.splits.train, 1)
    early = run.placement.sync(run.train_step()(run.init(), batch))
    assert are_equal(early) and run.placement.sync(early) is early


def test_a_checkpoint_is_the_average_of_all_groups(tmp_path):
    config = run_of(4, 2, sync="weights", sync_every=3).config
    loop = dataclasses.replace(config.loop, max_steps=4, save_every=4, eval_every=4)
    config = dataclasses.replace(config, loop=loop, run=RunOptions(workdir=tmp_path))
    done, said = trained(config)
    assert "Devices: 8 of 8, in 4 groups of 2.\n" in said
    assert "4 groups update their rows alone, by AdaGrad with c = 4, their num" in said
    assert done.state is not None and are_equal(done.state)
    with Checkpoints(tmp_path / CHECKPOINTS, keep=1) as checkpoints:
        saved = checkpoints.newest()
        assert saved is not None and saved.step == 4
        one = run_of(1, 1)
        found = read_state(checkpoints, saved, one.template(), one.placement.layout)
    want = in_order_of_rows(jax.device_get(vars(done.state)), ROWS)
    for name in ("table", "row_state"):
        chex.assert_trees_all_equal(found[name], want[name])
    # The c of a run that goes on is that of its groups, or is given.
    mesh = dataclasses.replace(config.mesh, replicas=2, shards=2)
    run = RunOptions(workdir=tmp_path, resume=True)
    for rows_c, sentence in ((None, "c = 2, their number."), (3.0, "c = 3, --optim.")):
        optim = dataclasses.replace(config.optim, rows_c=rows_c)
        fewer = dataclasses.replace(config, mesh=mesh, optim=optim, run=run)
        done, said = trained(fewer)
        assert f"2 groups update their rows alone, by AdaGrad with {sentence}" in said
        assert done.run is not None and done.run.row_update.optimizer.c == (rows_c or 2)


@pytest.mark.parametrize("every", [1, 2])
def test_what_travels_in_8_bits_is_rounded_again_as_it_was(every):
    how = dict(sync="weights", sync_every=every, wire_gradients="int8")

    def steps(state, first, last):
        run = run_of(4, 2, gradients="int8", **how)
        state = run.init() if state is None else TrainState(**state)
        for step in range(first, last):
            state = run.train_step()(state, run.read(run.splits.train, step))
        assert are_equal(state)
        return jax.tree.map(jnp.asarray, jax.device_get(vars(state)))

    half = steps(None, 0, 2)
    chex.assert_trees_all_equal(steps(half, 2, 4), steps(None, 0, 4))


def test_a_mesh_rounds_rows_to_bfloat16_as_one_device_does():
    found = []
    for run in (run_of(2, 4, "bf16"), run_of(1, 1, "bf16")):
        state = run.init()
        for step in range(2):
            state = run.train_step()(state, run.read(run.splits.train, step))
        assert state.table.dtype == jnp.bfloat16
        parts = jax.device_get(vars(state))
        parts = parts if run.placement.size == 1 else in_order_of_rows(parts, ROWS)
        found.append(parts["table"].astype(np.float32))
    # Sums in another order differ by some 2^-24: by 2^-16 of the distance of two
    # numbers in bfloat16, and so often other neighbours are drawn.
    assert np.count_nonzero(found[0] != found[1]) <= 4
    np.testing.assert_allclose(*found, rtol=2**-7, atol=1e-9)
