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
    schedule = make_schedule(0.5, OptimConfig(**options), 10)
    rates = [float(schedule(step)) for step in range(11)]
    np.testing.assert_allclose(rates, expected, atol=1e-7)


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(dense="sgd"), [-0.3, 0.4]),
        # An epsilon of 1, beside the root: 3 / (3 + 1), 4 / (4 + 1).
        (dict(dense="adam", eps=1.0), [-0.075, 0.08]),
        (dict(dense="adamw", eps=1.0), [-0.075, 0.08]),
        # In the root: 3 / sqrt(9 + 1), 4 / sqrt(16 + 1).
        (dict(dense="adagrad", eps=1.0), [-0.3 / 10**0.5, 0.4 / 17**0.5]),
        # Decoupled: lr * 0.5 * 2 more, whatever the gradient is.
        (dict(dense="adamw", weight_decay=0.5), [-0.2, 0.0]),
        # (3, -4) has norm 5.
        (dict(dense="sgd", clip_norm=1.0), [-0.06, 0.08]),
        (dict(dense="sgd", clip_norm=5.5), [-0.3, 0.4]),
        (dict(dense="sgd", warmup_steps=4), [-0.075, 0.1]),
    ],
)
def test_the_first_step_is_the_optimizers(options, expected):
    params, grads = jnp.full(2, 2.0), jnp.float32([3.0, -4.0])
    optimizer = make_dense_optimizer(OptimConfig(lr=0.1, **options), 100)

    @jax.jit
    def update(grads):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    with jax.numpy_dtype_promotion("standard"):  # optax's adam: float ** int32
        step = update(grads)
    np.testing.assert_allclose(step, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(rows_c=4.0), RowwiseAdagrad(eps=1e-6, c=4.0)),
        (dict(rows_c=4.0, rows_lagged=True), LaggedRowwiseAdagrad(eps=1e-6, c=4.0)),
        (dict(rows="adam"), Adam(eps=1e-6)),
        (dict(rows="sgd"), Sgd()),
    ],
)
def test_options_of_rows_are_those_of_the_row_optimizer(options, expected):
    assert make_row_optimizer(OptimConfig(eps=1e-6, **options)) == expected
