"""Several steps by one call: the same steps, the same lines, the same events."""

import dataclasses

import jax
import numpy as np
import pytest

from loka_jax.data import Position
from loka_jax.train.build import Run, build
from loka_jax.train.config import LoopConfig, ProbeOptions, RunOptions
from loka_jax.train.loop import Loop
from loka_jax.train.mesh.devices import MeshConfig
from loka_jax.train.steps_per_call import steps_at_once
from tests.support import train as support
from tests.support.train import config, digest, lines, train


def of(step, *, end=1000, probe=None, profile=None, **loop):
    """Returns the steps of a call at some step; log lines are far apart."""
    rare = dict(log_every=512, eval_every=512, look_every=512, steps_per_call=4)
    asked = dataclasses.replace(
        config(),
        loop=LoopConfig(**{**rare, **loop}),
        probe=ProbeOptions(every=probe),
        run=RunOptions(profile=profile),
    )
    return steps_at_once(asked, step, steps_per_epoch=700, end=end)


def test_what_is_due_between_steps_ends_a_call():
    assert [of(step) for step in (0, 4, 8, 508, 512)] == [4] * 5
    # Scales are looked at after every eighth step.
    assert [of(step) for step in (5, 6, 7)] == [1] * 3
    for name in ("log_every", "eval_every", "save_every", "look_every"):
        due = {name: 10}
        assert [of(step, **due) for step in (0, 8, 9, 10, 12)] == [4, 1, 1, 4, 4]
    assert of(700 - 4, eval_every=None) == 4
    assert of(700 - 2, eval_every=None) == 1  # the epoch ends
    assert [of(step, end=14) for step in (8, 12)] == [4, 1]
    assert of(8, steps_per_call=1) == 1


def test_observed_and_traced_steps_are_taken_one_by_one():
    assert [of(step, probe=16) for step in (0, 4, 12, 16)] == [1, 4, 4, 1]
    assert [of(step, profile="5:2") for step in (0, 4, 8)] == [4, 1, 4]


@pytest.fixture
def taken(monkeypatch):
    """Lists the steps of each call."""
    found, plain = [], Run.train_step

    def spy(self, *, steps=1, **how):
        found.append(steps)
        return plain(self, steps=steps, **how)

    monkeypatch.setattr(Run, "train_step", spy)
    return found


@pytest.fixture
def last_state(monkeypatch):
    """Lists the digest of the state at the end of each run."""
    found, plain = [], Loop.train

    def spy(self, stop):
        plain(self, stop)
        found.append(digest(self.state))

    monkeypatch.setattr(Loop, "train", spy)
    return found


def test_a_run_is_the_same_bit_for_bit(tmp_path, monkeypatch, taken, last_state):
    support.share_data(monkeypatch)
    options = dict(max_steps=38, epochs=4, log_every=12, eval_every=20)
    for count in (1, 4):
        taken.clear()
        folder = tmp_path / str(count)
        assert train(config(folder, steps_per_call=count, **options))[0] == 0
        assert taken.count(count) >= 5 and set(taken) <= {1, count}
    assert last_state[0] == last_state[1]
    assert lines(tmp_path / "1") == lines(tmp_path / "4")


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_run_over_devices_is_the_same(tmp_path, monkeypatch, taken, last_state):
    support.share_data(monkeypatch)
    options = dict(max_steps=18, epochs=4, log_every=9, eval_every=18)
    for count in (1, 3):
        taken.clear()
        asked = config(tmp_path / str(count), steps_per_call=count, **options)
        asked = dataclasses.replace(asked, mesh=MeshConfig(shards=2))
        assert train(asked)[0] == 0
        assert taken.count(count) >= 2
    assert last_state[0] == last_state[1]
    assert lines(tmp_path / "1") == lines(tmp_path / "3")


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_a_call_over_devices_takes_the_same_steps():
    asked = config(batch_size=256, steps_per_call=2)
    asked = dataclasses.replace(asked, mesh=MeshConfig(replicas=2, shards=4))
    run = build(asked, None, lambda line: None)
    batches = [
        jax.tree.map(
            np.asarray, run.splits.train.batch(Position(0, 0, 0), 256, shuffle=True)
        )
        for _ in range(4)
    ]
    start = run.init()
    for batch in batches[:2]:
        start = run.first_step(start, batch)
    start = jax.device_get(vars(start))

    def state():
        return type(run.init())(
            **jax.tree.map(
                lambda x, like: jax.device_put(x, like.sharding), start, run.template()
            )
        )

    one = state()
    for batch in batches[2:]:
        one = run.step(one, batch)
    two = run.train_step(scales_initialized=True, steps=2)(state(), *batches[2:])
    assert digest(jax.device_get(vars(one))) == digest(jax.device_get(vars(two)))


def test_rows_that_groups_average_later_need_a_call_for_each_step():
    with pytest.raises(ValueError, match="--loop.steps-per-call 2 .*sync-every 4"):
        dataclasses.replace(
            config(steps_per_call=2),
            mesh=MeshConfig(replicas=2, shards=1, sync="weights", sync_every=4),
        )
