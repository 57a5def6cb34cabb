"""Flip-flop against known covariances of rows and columns."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.probe import matrix_normal
from loka_jax.probe.matrix_normal import empty_weights, update

pytestmark = pytest.mark.slow


def _covariance(size, seed):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((size, 2 * size))
    return a @ a.T / (2 * size) + 0.1 * np.eye(size)


def _weights(k, n, count, mean):
    u, v = _covariance(k, 1), _covariance(n, 2)
    z = np.random.default_rng(3).standard_normal((count, k, n))
    w = mean + np.linalg.cholesky(u) @ z @ np.linalg.cholesky(v).T
    return jnp.asarray(w, jnp.float32), np.kron(v, u)


def _learn(weights, state, **kwargs):
    step = lambda state, w: (update(state, w, **kwargs), None)  # noqa: E731
    return jax.lax.scan(step, state, weights)[0]


def _error(state, exact):
    covariance = np.kron(np.asarray(state.columns[0]), np.asarray(state.rows[0]))
    return np.linalg.norm(covariance - exact) / np.linalg.norm(exact)


@pytest.mark.slow
def test_three_thousand_weights_give_both_covariances():
    mean = 3 * np.random.default_rng(0).standard_normal((24, 40))
    weights, exact = _weights(24, 40, 3000, mean)
    state = _learn(weights, empty_weights(24, 40), mean_momentum=0.99)
    assert _error(state, exact) < 0.1
    np.testing.assert_allclose(state.mean, mean, atol=0.6)
    np.testing.assert_allclose(jnp.trace(state.rows[0]), 24, rtol=1e-4)
    # That the mean follows fast is corrected for.
    assert _error(_learn(weights, empty_weights(24, 40)), exact) < 0.1
    # With less memory it scatters, as the default's comment says.
    state = _learn(weights, empty_weights(24, 40), momentum=0.9)
    assert _error(state, exact) > 0.2


def test_the_first_weight_is_the_mean():
    w = jnp.arange(6.0).reshape(2, 3)
    state = update(empty_weights(2, 3), w)
    np.testing.assert_allclose(state.mean, w, rtol=1e-5)
    chex.assert_trees_all_equal(empty_weights(2, 3).mean, jnp.zeros((2, 3)))


def test_the_mean_can_move_alone():
    weights, _ = _weights(6, 8, 20, np.ones((6, 8)))
    whole = _learn(weights, empty_weights(6, 8))
    alone = _learn(weights, empty_weights(6, 8), moves_covariances=False)
    chex.assert_trees_all_close(alone.mean, whole.mean, rtol=1e-5)
    assert alone.moves == 0 and whole.moves == 19
    chex.assert_trees_all_equal(alone.columns, empty_weights(6, 8).columns)


@pytest.mark.parametrize("w", [jnp.zeros((2, 3)), jnp.ones((2, 3))])
def test_a_weight_that_never_moves_does_no_harm(w):
    state = _learn(jnp.stack([w] * 30), empty_weights(2, 3))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))


def test_a_weight_that_is_not_finite_is_left_out():
    state = update(empty_weights(2, 3), jnp.ones((2, 3)))
    bad = jnp.ones((2, 3)).at[0, 1].set(jnp.nan)
    chex.assert_trees_all_equal(update(state, bad), state)


def test_wide_weights_keep_blocks():
    state = empty_weights(10, 50, max_bytes=4 * 50 * 16)
    assert state.rows.shape == (1, 10, 10) and state.columns.shape == (4, 16, 16)
    weights = jax.random.normal(jax.random.key(0), (400, 10, 50))
    state = _learn(weights, state)
    variances = jnp.diagonal(state.columns, axis1=1, axis2=2).reshape(-1)
    np.testing.assert_allclose(variances[:50], 1.0, atol=0.35)
    assert not variances[50:].any()
    assert matrix_normal.MOMENTUM == 0.99
