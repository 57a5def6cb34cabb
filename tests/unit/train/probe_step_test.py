"""Statistics of the sites in training steps, and in runs that stop and go on."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import optax
import pytest

from loka_jax.nn import ProbeConfig
from loka_jax.optim import Sgd
from loka_jax.probe.live_errors import LiveErrors
from loka_jax.probe.tails import Tails
from loka_jax.train.config import ProbeOptions
from loka_jax.train.state import init_state
from loka_jax.train.step import RowUpdate, make_train_step
from tests.support.train import config, share_steps, train
from tests.unit.train.session_test import last_state
from tests.unit.train.step_test import F32, FP8, TABLES, make_batch

__all__ = ["last_state"]  # a fixture
CONFIG = ProbeConfig()


def _state(model, probe=CONFIG):
    return init_state(
        jax.random.key(0),
        model=model,
        tables=TABLES,
        num_dense=13,
        optimizer=optax.sgd(0.1),
        row_optimizer=Sgd(),
        init_stddev=0.5,
        probe=probe,
    )


@functools.cache
def _step(model, probe=CONFIG, microbatches=1):
    rows = RowUpdate(Sgd(), optax.constant_schedule(0.1), 0.0)
    step = make_train_step(
        model, TABLES, optax.sgd(0.1), rows, microbatches=microbatches, probe=probe
    )
    return jax.jit(step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(F32, id="f32", marks=pytest.mark.drill),
        pytest.param(FP8, id="fp8"),
    ],
)
def test_a_step_that_is_observed_trains_as_any_other(model):
    state, plain = _state(model), _state(model, None)
    for seed in range(3):
        state = _step(model)(state, make_batch(seed))
        plain = _step(model, None)(plain, make_batch(seed))
    for name in ("params", "fp8", "table"):
        chex.assert_trees_all_close(
            getattr(state, name), getattr(plain, name), rtol=1e-5, atol=1e-6
        )
    assert plain.probe == {}
    for stats in jax.tree.leaves(state.probe, is_leaf=lambda x: hasattr(x, "lhs")):
        assert stats.lhs.moments.count == stats.g.moments.count == 3 * 64
        assert stats.rhs.normal.steps == 3


@pytest.mark.slow
def test_the_first_layer_sees_the_dense_features():
    state, batches = _state(F32), [make_batch(seed) for seed in range(3)]
    for batch in batches:
        state = _step(F32)(state, batch)
    rows = np.concatenate([np.asarray(batch.dense) for batch in batches])
    bottom = state.probe["bottom_mlp"]["dense_0"]["stats"]
    np.testing.assert_allclose(
        bottom.lhs.moments.covariance[0][:13, :13],
        np.cov(rows, rowvar=False),
        atol=1e-3,
    )


@pytest.mark.slow
def test_microbatches_are_one_batch():
    whole = _step(F32)(_state(F32), make_batch())
    parts = _step(F32, microbatches=4)(_state(F32), make_batch())

    # Each part is cast with scales of its own, and the last one is remembered; each
    # counts as a step of which errors are measured.
    def without_casts(probe):
        def drop(x):
            if isinstance(x, LiveErrors):
                return None
            return x.values[:6] if isinstance(x, Tails) else x

        is_leaf = lambda x: isinstance(x, Tails | LiveErrors)  # noqa: E731
        return jax.tree.map(drop, probe, is_leaf=is_leaf)

    chex.assert_trees_all_close(
        *map(without_casts, (parts.probe, whole.probe)), rtol=2e-3, atol=1e-4
    )


def test_a_skipped_step_adds_nothing():
    state = _step(F32)(_state(F32), make_batch())
    bad = make_batch(1)
    bad = bad._replace(dense=bad.dense * np.nan)
    after = _step(F32)(state, bad)
    assert after.skipped == 1
    chex.assert_trees_all_equal(after.probe, state.probe)


@pytest.mark.slow
def test_a_run_that_stops_and_goes_on_learns_the_same(
    tmp_path, last_state, monkeypatch
):
    share_steps(monkeypatch)

    def run(name, **loop):
        made = config(tmp_path / name, **loop)
        probe = ProbeOptions(every=1, covariances_every=1)
        train(dataclasses.replace(made, probe=probe))

    run("cut", max_steps=4)
    run("cut", max_steps=8, resume=True)
    run("whole", max_steps=8)
    assert last_state[1] == last_state[2]


@pytest.mark.parametrize(
    "options, match",
    [
        ({"every": -1}, "--probe.every -1 must be at least 0"),
        ({"max_rows": 1}, "--probe.max-rows 1 must be at least 2"),
        ({"momentum": 0.0}, r"--probe.momentum 0.0 must be in \(0, 1\)"),
    ],
)
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        ProbeOptions(**options)


def test_steps_are_observed_when_they_are_due():
    options = ProbeOptions(every=4, covariances_every=2)
    due = {step: options.config_at(step) for step in range(10)}
    moves = {k: v.moves_weight_covariances for k, v in due.items() if v is not None}
    assert moves == {0: True, 4: False, 8: True}
    assert not any(ProbeOptions().config_at(step) for step in range(10))
