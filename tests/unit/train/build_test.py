"""What is made from a configuration before anything is trained."""

import numpy as np
import pytest

from loka_jax.data import Position
from loka_jax.models import Dlrm
from loka_jax.train import metrics
from loka_jax.train.build import build
from loka_jax.train.config import DlrmConfig
from loka_jax.train.evaluation import evaluate
from loka_jax.train.step import logits_of
from tests.support import train as support
from tests.support.train import digest


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    support.share_data(monkeypatch)


@pytest.mark.slow
def test_steps_are_counted_over_epochs_and_capped():
    assert build(support.config(epochs=3)).total_steps == 30
    assert build(support.config(epochs=3, max_steps=7)).total_steps == 7
    assert build(support.config(batch_size=96)).steps_per_epoch == 4  # the last padded


def test_sites_are_listed_at_the_size_of_a_microbatch():
    run = build(support.config(batch_size=64, microbatches=2))
    assert {site.spec.m for site in run.sites} == {32}


@pytest.mark.slow
def test_the_seed_decides_the_start():
    starts = [build(support.config(seed=seed)).init() for seed in (0, 0, 1)]
    tables = [digest(state.table) for state in starts]
    params = [digest(state.params) for state in starts]
    assert tables[0] == tables[1] != tables[2]
    assert params[0] == params[1] != params[2]


def test_a_recipe_without_delayed_scales_compiles_one_step():
    config = DlrmConfig(name="x", model=Dlrm(recipe="bf16"), data=support.DATA)
    run = build(config)
    assert run.step is run.first_step
    delayed = build(support.config())
    assert delayed.step is not delayed.first_step


def test_an_evaluation_sees_every_example_once():
    run = build(support.config(batch_size=48))  # 64 examples: one and a third batch
    state, valid = run.init(), run.splits.valid
    found = evaluate(run, state, valid)
    assert found.values["count"] == 64
    whole = valid.batch(Position(0, 0, 0), 64, shuffle=False)
    logits = logits_of(run.planned, run.tables, state, whole)
    expected = metrics.auc(*map(np.asarray, (logits, whole.labels, whole.weights)))
    assert found.values["auc"] == pytest.approx(expected, abs=1e-3)
