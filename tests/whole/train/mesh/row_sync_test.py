"""Groups that update rows alone, on eight CPU devices: bytes and checkpoints."""

import dataclasses
import functools
import io

import chex
import jax
import pytest
from rich.console import Console

from loka_jax.optim import OptimConfig
from loka_jax.saved_format import CHECKPOINTS
from loka_jax.train import build as build_lib
from loka_jax.train import session
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.row_layout import read_state
from loka_jax.train.config import RunOptions
from loka_jax.train.mesh.devices import MeshConfig
from tests.support import train as support
from tests.support.mesh import in_order_of_rows
from tests.support.train import digest

SIZE = 128
DATA = dataclasses.replace(support.DATA, examples=4 * SIZE)
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


def are_equal(state):
    """Returns whether all replicas have the same tables."""
    by_index = {}
    for shard in state.table.addressable_shards:
        by_index.setdefault(str(shard.index), set()).add(digest(shard.data))
    return all(len(found) == 1 for found in by_index.values())


@functools.cache
def run_of(groups, shards, **sync):
    """A run of the small model."""
    config = support.config(batch_size=SIZE, data=DATA)
    config = dataclasses.replace(
        config,
        model=config.model.clone(dropout_rate=0.0),
        optim=OptimConfig(lr=0.01, rows="rowwise_adagrad", rows_lr=0.1),
        mesh=MeshConfig(
            replicas=groups,
            shards=shards,
            wire_rows="f32",
            wire_gradients="f32",
            **sync,
        ),
    )
    return build_lib.build(config, None, lambda line: None)


def test_groups_differ_until_they_are_averaged():
    run = run_of(4, 2, sync="weights", sync_every=3)
    states, state = {}, run.init()
    for step in range(1, 4):
        state = run.first_step(state, run.read(run.splits.train, step))
        states[step] = are_equal(state)
    assert states == {1: False, 2: False, 3: True}
    # Earlier, if something is to read them.
    batch = run.read(run.splits.train, 1)
    early = run.synced(run.first_step(run.init(), batch))
    assert are_equal(early) and run.synced(early) is early


def test_a_checkpoint_is_the_average_of_all_groups(tmp_path):
    config = run_of(4, 2, sync="weights", sync_every=3).config
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
        one = run_of(1, 1)
        found = read_state(checkpoints, saved, one.template(), one.layout)
    want = in_order_of_rows(jax.device_get(vars(done.state)), sum(DATA.rows))
    for name in ("table", "row_state"):
        chex.assert_trees_all_equal(found[name], want[name])
