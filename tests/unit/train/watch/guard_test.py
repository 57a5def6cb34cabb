"""When a run counts as diverged, and what is named as the cause."""

import dataclasses

import jax
import numpy as np
import pytest

from loka_jax import nn
from loka_jax.data import Batch, Position
from loka_jax.train import build as build_lib
from loka_jax.train.metrics import CappedNe
from loka_jax.train.step import logits_of
from loka_jax.train.watch import guard
from loka_jax.train.watch.guard import ABSURD, ENOUGH, LIMIT, Guard
from tests.support import train as support


def after(*windows, is_warm=True, of_half=1.0, rarer=ENOUGH):
    seen = Guard()
    for ne in windows:
        seen = seen.after(CappedNe(ne, of_half, rarer), is_warm=is_warm)
    return seen


@pytest.mark.parametrize(
    "windows",
    [
        (1.02, 0.99, 1.01),  # data without signal
        (0.8, 2.0, 0.8, 3.0, 0.8),  # single batches of outliers
        (0.2, 0.9, 1.1),  # other data than the model had memorized
        (2.9, 2.5, 2.0),  # a bad start that gets better
        (0.9, None, None, None),  # windows without examples
    ],
)
def test_healthy_runs_are_let_alone(windows):
    assert not after(*windows).has_diverged


@pytest.mark.parametrize(
    "windows",
    [
        (0.9, 1.01 * LIMIT, 1.01 * LIMIT),
        (0.9, np.inf, np.inf),
        (np.nan, np.nan),
        (2 * ABSURD, ABSURD + 1),
        (0.9, 5.0, None, 5.0),
    ],
)
def test_two_bad_windows_in_a_row_are_divergence(windows):
    assert after(*windows).has_diverged
    assert not after(*windows[:-1]).has_diverged
    assert not after(*windows[:-1]).is_healthy


@pytest.mark.parametrize("is_warm", [True, False])
def test_an_untrained_model_of_rare_clicks_is_let_alone(is_warm):
    """At 0.1 % of clicks predicting one half has an NE of 88."""
    rare = dict(of_half=88.0, is_warm=is_warm)
    assert after(88.0, 31.0, 22.0, 5.0, 1.2, 0.95, **rare).is_healthy
    assert after(88.0, **rare).is_healthy
    assert after(0.95, *2 * [1.1 * LIMIT], **rare).has_diverged == is_warm
    assert after(*2 * [89 * ABSURD], **rare).has_diverged
    assert after(22.0, *2 * [22.1 * LIMIT], **rare).has_diverged == is_warm


def test_few_examples_of_a_label_are_no_divergence():
    few = dict(rarer=ENOUGH - 1)
    assert after(0.9, 2.0, 2.5, **few).is_healthy
    assert after(0.9, ABSURD + 1, ABSURD + 1, **few).has_diverged
    assert after(np.nan, np.nan, **few).has_diverged


def test_the_warm_up_forgives_what_is_not_absurd():
    assert after(0.9, 2.5, 2.5, is_warm=False).is_healthy
    assert after(0.9, ABSURD + 1, ABSURD + 1, is_warm=False).has_diverged


@pytest.fixture(scope="module")
def run():
    config = support.config()
    return build_lib.build(dataclasses.replace(config, plan="off"))


@pytest.fixture(scope="module")
def batch(run):
    return run.splits.train.batch(Position(0, 0, 0), 32, shuffle=False)


def cause(run, state, batch: Batch):
    columns = run.splits.train.schema.dense
    return guard.likely_cause(run.planned, run.eval_step, state, batch, columns)


def test_a_huge_feature_is_named_with_its_column(run, batch):
    dense = np.array(batch.dense)
    dense[3, 2] = -999999.0
    column = run.splits.train.schema.dense[2]
    found = cause(run, run.init(), batch._replace(dense=dense))
    assert f"column {column!r} holds 1e+06" in found and "--data.transform" in found


def test_scales_that_do_not_fit_are_named(run, batch):
    state = run.init()
    sure = jax.tree.map(lambda x: 20 * x, state.params)  # logits far from 0
    state = dataclasses.replace(state, params=sure)
    by_bf16 = nn.Planned(run.model.clone(recipe="bf16"))
    logits = logits_of(by_bf16, run.tables, state, batch)
    labelled = batch._replace(labels=np.asarray(logits > 0, np.float32))
    assert "learning rate" in cause(run, state, labelled)
    flushing = jax.tree.map(lambda x: x * 0 + 1e30, state.fp8)
    found = cause(run, dataclasses.replace(state, fp8=flushing), labelled)
    assert "FP8 is the likely cause" in found and "in bfloat16; use --recipe" in found


def test_else_it_is_the_learning_rate(run, batch):
    state = run.init()
    huge = jax.tree.map(lambda x: 1e4 * x, state.params)
    state = dataclasses.replace(state, params=huge)
    found = cause(run, state, batch)
    assert "learning rate is the likely cause" in found and "--optim.lr" in found
    assert "if --recipe bf16 trains well" in found
    in_bf16 = dataclasses.replace(run, model=run.model.clone(recipe="bf16"))
    found = cause(in_bf16, state, batch)
    assert "learning rate is the likely cause" in found and "--recipe" not in found


def test_a_state_that_is_not_finite_is_poisoned(run):
    state = run.init()
    assert not guard.poisoned(state)
    for name in ("params", "table", "opt_state"):
        bad = jax.tree.map(
            lambda x: x * np.inf if np.issubdtype(x.dtype, np.floating) else x,
            getattr(state, name),
        )
        assert guard.poisoned(dataclasses.replace(state, **{name: bad})), name
