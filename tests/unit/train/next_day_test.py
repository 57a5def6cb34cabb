"""A run that goes on from another one: what it takes from it, and what it says."""

import dataclasses
import io
import pathlib
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

from loka_jax.data import DataConfig, Position
from loka_jax.optim import OptimConfig
from loka_jax.train import next_day
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.config import EmbeddingConfig
from loka_jax.train.folder.source_run import SourceRun
from loka_jax.train.watch.host_state import Progress
from tests.support import train as support
from tests.support.loop import StandInCheckpoints, make_loop

MONDAY = {"data": "monday.csv", "examples": 9, "auc": 0.5, "logloss": 0.7, "ne": 1.0}
MONDAY |= {"calibration": 1.0}
EARLIER = Progress(step=7, position=Position(1, 2, 0), days=(MONDAY,))


@pytest.fixture
def source():
    saved = Saved(7, {"progress": dataclasses.asdict(EARLIER)}, {})
    folder = StandInCheckpoints("source", [])
    return SourceRun(pathlib.Path("one"), support.config(), folder, saved)


def test_a_day_is_scored_before_a_run_is_trained_on_it(monkeypatch, source):
    data = DataConfig(kind="table", path="/data/tuesday.csv")
    made, out = make_loop(support.config(data=data)), io.StringIO()
    values = {"auc": None, "logloss": 0.25, "ne": 0.5, "calibration": 1.0}
    quality = mock.Mock(return_value=values)
    monkeypatch.setattr(next_day, "quality", quality)
    next_day.begin(made.loop, source, Console(file=out, width=200))
    quality.assert_called_once_with(made.run, made.loop.state, made.run.splits.train)
    first, last = made.loop.progress.days
    assert (first, made.loop.progress.step) == (MONDAY, 0)
    assert (last["data"], last["examples"], last["ne"]) == ("tuesday.csv", 148, 0.5)
    scored = "tuesday.csv (148 rows): AUC n/a  log loss 0.25000  NE 0.50000"
    assert "Going on from step 7 of one." in out.getvalue()
    assert f"Before training on {scored}" in out.getvalue()


def test_schedules_start_anew_and_moments_go_on():
    params = {"w": jnp.ones(2)}
    optimizer = optax.adam(lambda step: 0.1)
    state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            _, state = optimizer.update(params, state, params)
    moments, schedule = next_day._restarted(state)
    assert (int(moments.count), int(schedule.count)) == (3, 0)
    chex.assert_trees_all_equal(moments, state[0])


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(optim=OptimConfig(clip_norm=1.0)), "optim.clip_norm"),
        (dict(model=support.MODEL.clone(top_mlp=(8,))), "model.top_mlp: saved .16., n"),
        (dict(embedding=EmbeddingConfig(dim=8)), "embedding.dim"),
    ],
)
def test_another_model_or_optimizer_is_refused(monkeypatch, source, change, named):
    open_run = mock.Mock(return_value=source)
    monkeypatch.setattr(next_day, "open_run", open_run)
    config = dataclasses.replace(support.config(), init_from=source.workdir)
    with pytest.raises(ValueError, match=f"another model or optimizer .*{named}"):
        next_day.source_of(dataclasses.replace(config, **change))
    # A rate, a seed, the data: none of these decides the shapes of a state.
    other = support.config(seed=4, batch_size=16)
    optim = dataclasses.replace(other.optim, lr=0.5, rows_lr=0.5)
    other = dataclasses.replace(other, optim=optim, init_from=source.workdir)
    assert next_day.source_of(other) is source
    open_run.assert_called_with(source.workdir, best=True)  # the state that was judged
    assert next_day.source_of(support.config()) is None
