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
    """Returns the change of parameters of 2 in the first step."""
    params = jnp.full(grads.shape, 2.0)
    optimizer = make_dense_optimizer(config, 100)

    @jax.jit
    def update(grads):
        return optimizer.update(grads, optimizer.init(params), params)[0]

    with jax.numpy_dtype_promotion("standard"):  # optax's adam: float ** int32
        return np.asarray(update(grads))


@pytest.mark.parametrize(
    "config, expected",
    [
        (OptimConfig(), [0.5] * 11),
        (
            OptimConfig(warmup_steps=4, decay="linear"),
            [0.125, 0.25, 0.375, 0.5] + [0.5 * (1 - i / 6) for i in range(7)],
        ),
        (
            OptimConfig(decay="cosine"),
            0.25 * (1 + np.cos(np.pi * np.arange(11) / 10)),
        ),
        # A run shorter than its warmup only rises.
        (OptimConfig(warmup_steps=20), 0.5 * np.arange(1, 12) / 20),
    ],
)
def test_schedules_warm_up_and_fall_as_asked(config, expected):
    np.testing.assert_allclose(rates(config), expected, atol=1e-7)


@pytest.mark.parametrize(
    "config, expected",
    [
        (OptimConfig(dense="sgd", lr=0.1), [-0.3, 0.4]),
        # An epsilon of 1, beside the root: 3 / (3 + 1), 4 / (4 + 1).
        (OptimConfig(dense="adam", lr=0.1, eps=1.0), [-0.075, 0.08]),
        (OptimConfig(dense="adamw", lr=0.1, eps=1.0), [-0.075, 0.08]),
        # In the root: 3 / sqrt(9 + 1), 4 / sqrt(16 + 1).
        (
            OptimConfig(dense="adagrad", lr=0.1, eps=1.0),
            [-0.3 / 10**0.5, 0.4 / 17**0.5],
        ),
        # Decoupled: lr * 0.5 * 2 more, whatever the gradient is.
        (OptimConfig(dense="adamw", lr=0.1, weight_decay=0.5), [-0.2, 0.0]),
        # (3, -4) has norm 5.
        (OptimConfig(dense="sgd", lr=0.1, clip_norm=1.0), [-0.06, 0.08]),
        (OptimConfig(dense="sgd", lr=0.1, clip_norm=5.5), [-0.3, 0.4]),
        (OptimConfig(dense="sgd", lr=0.1, warmup_steps=4), [-0.075, 0.1]),
    ],
)
def test_the_first_step_is_the_optimizers(config, expected):
    step = first_step(config, jnp.asarray([3.0, -4.0]))
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
