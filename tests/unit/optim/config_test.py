"""Options of optimizers: which are refused, and what the others make."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import optim
from loka_jax.optim import OptimConfig, Plateau

# Values that each option refuses, beside NaN.
OUT_OF_RANGE = {
    **dict.fromkeys(("lr", "rows_lr", "clip_norm"), (0.0, -1.0, math.inf)),
    **dict.fromkeys(("rows_l2", "rows_c"), (-1.0, math.inf)),
    "plateau_factor": (-1.0, math.inf),
}


@pytest.mark.parametrize("name, values", OUT_OF_RANGE.items(), ids=str)
def test_a_number_out_of_range_is_refused_by_its_option(name, values):
    for value in (*values, math.nan):
        with pytest.raises(ValueError, match=f"--optim.{name.replace('_', '-')} "):
            OptimConfig(**{name: value})


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(warmup_steps=-1), "-1 must lie between"),
        (dict(plateau_patience=0), "0 must lie between"),
        (dict(task_weights=(1.0, 0.0)), "--optim.task-weights"),
        (dict(task_weights=(1.0, math.nan)), "--optim.task-weights"),
        (dict(task_weights=(1.0, 2e6)), "--optim.task-weights"),
        # What would be ignored.
        (dict(rows="sgd", rows_c=2.0), "--optim.rows-c needs --optim.rows rowwise_ad"),
        (dict(rows="sgd", rows_lagged=True), "--optim.rows-lagged needs --optim.rows"),
    ],
)
def test_other_settings_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        OptimConfig(**options)


def test_limits_themselves_are_served():
    limits = dict(plateau_factor=1.0, plateau_patience=1, lr=1e3)
    limits |= dict(clip_norm=1e-12, task_weights=(1e6,))
    config = OptimConfig(**limits)
    assert {name: getattr(config, name) for name in limits} == limits


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, np.full(11, 0.5)),
        (
            dict(warmup_steps=4, decay="linear"),
            np.interp(range(11), [0, 3, 4, 10], [0.125, 0.5, 0.5, 0]),
        ),
        (dict(decay="cosine"), 0.25 * (1 + np.cos(np.pi * np.arange(11) / 10))),
        # A run shorter than its warmup only rises.
        (dict(warmup_steps=20), 0.5 * np.arange(1, 12) / 20),
    ],
)
def test_schedules_warm_up_and_fall_as_asked(options, expected):
    schedule = optim.make_schedule(0.5, OptimConfig(**options), 10)
    rates = [float(schedule(step)) for step in range(11)]
    np.testing.assert_allclose(rates, expected, atol=1e-7)


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(dense="sgd"), [-0.3, 0.4]),
        # The gradient over its own size.
        (dict(dense="adam"), [-0.1, 0.1]),
        (dict(dense="adagrad"), [-0.1, 0.1]),
        # (3, -4) has norm 5.
        (dict(dense="sgd", clip_norm=1.0), [-0.06, 0.08]),
        (dict(dense="sgd", clip_norm=5.5), [-0.3, 0.4]),
        (dict(dense="sgd", warmup_steps=4), [-0.075, 0.1]),
    ],
)
def test_the_first_step_is_the_optimizers(options, expected):
    params, grads = jnp.full(2, 2.0), jnp.float32([3.0, -4.0])
    optimizer = optim.make_dense_optimizer(OptimConfig(lr=0.1, **options), 100)

    @jax.jit
    def update(grads):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    with jax.numpy_dtype_promotion("standard"):  # optax's adam: float ** int32
        step = update(grads)
    np.testing.assert_allclose(step, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(), optim.RowwiseAdagrad(c=3.0)),
        (dict(rows_c=4.0), optim.RowwiseAdagrad(c=4.0)),
        (dict(rows_lagged=True), optim.LaggedRowwiseAdagrad(c=3.0)),
        (dict(rows_c=4.0, rows_lagged=True), optim.LaggedRowwiseAdagrad(c=4.0)),
        (dict(rows="adam"), optim.Adam()),
        (dict(rows="sgd"), optim.Sgd()),
    ],
)
def test_options_of_rows_are_those_of_the_row_optimizer(options, expected):
    config = OptimConfig(**options)
    assert optim.make_row_optimizer(config, groups=3) == expected


CONFIG = OptimConfig(best_by="auc", plateau_factor=0.1, plateau_patience=2)


def follow(values, config=CONFIG):
    plateau = Plateau()
    for value in values:
        plateau = plateau.after(value, config)
    return plateau


def test_a_better_auc_resets_the_stalls_but_not_the_rates():
    after = follow([0.7, 0.6, 0.8])
    assert after == Plateau(best=0.8, stalls=0, lr_scale=0.1)
    assert not follow([0.7, 0.6, 0.8, 0.7]).stop
    # A gain of a millionth is a stall.
    assert [follow([0.7, 0.7 + gain]).stalls for gain in (5e-7, 2e-6)] == [1, 0]
    after = follow([0.7, 0.6, 0.5, 0.4], OptimConfig(best_by="auc"))
    assert after == Plateau(best=0.7)  # all, without patience


@pytest.mark.parametrize("measure", ["ne", "logloss"])
def test_a_lower_loss_is_better(measure):
    config = dataclasses.replace(CONFIG, best_by=measure)
    assert follow([0.9, 0.8, 0.7], config) == Plateau(best=0.7)
    assert follow([0.9, 0.8, 0.85, 0.8 - 5e-7], config).stop
    assert follow([7.0], config).best == 7.0  # worse than predicting the mean, so far


@pytest.mark.parametrize("auc", [None, math.nan])
def test_an_undefined_auc_is_a_stall_and_never_the_best(auc):
    assert follow([0.7, auc]) == Plateau(best=0.7, stalls=1, lr_scale=0.1)
    assert follow([auc]).best is None


def test_the_patience_is_counted_in_stalls_in_a_row():
    patient = dataclasses.replace(CONFIG, plateau_patience=3)
    assert not follow([0.7, 0.6, 0.6], patient).stop
    after = follow([0.7, 0.6, 0.6, 0.8, 0.6, 0.6], patient)
    assert (after.stop, after.stalls, after.best) == (False, 2, 0.8)
    assert after.lr_scale == pytest.approx(1e-4)
    assert follow([0.7, 0.6, 0.6, 0.6], patient).stop
