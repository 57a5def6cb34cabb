import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.optim import (
    Adam,
    LaggedRowwiseAdagrad,
    OptimConfig,
    RowwiseAdagrad,
    Sgd,
    make_dense_optimizer,
    make_row_optimizer,
    make_schedule,
)


def rates(config, total_steps=10):
    schedule = make_schedule(0.5, config, total_steps)
    return np.asarray([float(schedule(step)) for step in range(total_steps + 1)])


def first_step(config, grads):
    """The change of parameters of 2 in the first step."""
    params = jnp.full(grads.shape, 2.0)
    optimizer = make_dense_optimizer(config, 100)
    with jax.numpy_dtype_promotion("standard"):  # optax's adam: float ** int32
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return np.asarray(updates)


def test_the_constant_schedule_stays():
    np.testing.assert_allclose(rates(OptimConfig()), 0.5)


def test_the_linear_schedule_warms_up_and_falls_to_zero_at_the_last_step():
    config = OptimConfig(warmup_steps=4, decay="linear")
    expected = [0.125, 0.25, 0.375, 0.5] + [0.5 * (1 - i / 6) for i in range(7)]
    np.testing.assert_allclose(rates(config), expected, atol=1e-7)


def test_the_cosine_schedule_follows_half_a_cosine():
    config = OptimConfig(decay="cosine")
    expected = 0.25 * (1 + np.cos(np.pi * np.arange(11) / 10))
    np.testing.assert_allclose(rates(config), expected, atol=1e-7)


@pytest.mark.parametrize("warmup", [1, 10])
def test_a_warmup_reaches_the_rate_at_its_last_step(warmup):
    rising = rates(OptimConfig(warmup_steps=warmup))[:warmup]
    expected = 0.5 * np.arange(1, warmup + 1) / warmup
    np.testing.assert_allclose(rising, expected, rtol=1e-6)


def test_a_run_shorter_than_its_warmup_only_rises():
    schedule = make_schedule(0.5, OptimConfig(warmup_steps=20), 10)
    rising = [float(schedule(step)) for step in range(10)]
    np.testing.assert_allclose(rising, 0.5 * np.arange(1, 11) / 20, rtol=1e-6)


@pytest.mark.parametrize(
    "config, expected",
    [
        (OptimConfig(dense="sgd", lr=0.1), [-0.3, 0.4]),
        (OptimConfig(dense="adam", lr=0.1), [-0.1, 0.1]),
        (OptimConfig(dense="adagrad", lr=0.1), [-0.1, 0.1]),
        # Decoupled: lr * 0.5 * 2 more, whatever the gradient is.
        (OptimConfig(dense="adamw", lr=0.1, weight_decay=0.5), [-0.2, 0.0]),
        # (3, -4) has norm 5.
        (OptimConfig(dense="sgd", lr=0.1, clip_norm=1.0), [-0.06, 0.08]),
    ],
    ids=["sgd", "adam", "adagrad", "adamw", "clipped"],
)
def test_the_first_step_is_the_optimizers(config, expected):
    step = first_step(config, jnp.asarray([3.0, -4.0]))
    np.testing.assert_allclose(step, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dense", ["adam", "adamw", "adagrad", "sgd"])
def test_updates_are_proportional_to_the_learning_rate(dense):
    # So that a factor on the updates is a factor on the rate (reduce on plateau).
    decay = 0.5 if dense == "adamw" else 0.0
    grads = jnp.asarray([3.0, -4.0])
    whole, tenth = (
        first_step(OptimConfig(dense=dense, lr=lr, weight_decay=decay), grads)
        for lr in (0.1, 0.01)
    )
    np.testing.assert_allclose(0.1 * whole, tenth, rtol=1e-5, atol=1e-7)


def test_rows_names_the_row_optimizer():
    made = [
        make_row_optimizer(OptimConfig(rows=rows, eps=1e-6))
        for rows in ("rowwise_adagrad", "adam", "sgd")
    ]
    assert made == [RowwiseAdagrad(eps=1e-6), Adam(eps=1e-6), Sgd()]


def test_rows_c_and_lag_are_those_of_rowwise_adagrad():
    options = OptimConfig(rows_c=4.0, eps=1e-6)
    assert make_row_optimizer(options) == RowwiseAdagrad(eps=1e-6, c=4.0)
    lagged = dataclasses.replace(options, rows_lagged=True)
    assert make_row_optimizer(lagged) == LaggedRowwiseAdagrad(eps=1e-6, c=4.0)
