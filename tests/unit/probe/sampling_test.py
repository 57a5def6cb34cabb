"""Drawn operands have what was learned."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.probe.matrix_normal import empty_weights, update
from loka_jax.probe.moments import empty_moments, moments_of
from loka_jax.probe.sampling import sample_rows, sample_weight


def _moments(k, size):
    mix = jax.random.normal(jax.random.key(1), (k, k))
    rows = jax.random.normal(jax.random.key(0), (1000, k)) @ mix + 5.0
    return moments_of(rows, size)


@pytest.mark.parametrize("size", [12, 5])
def test_rows_converge_to_the_learned_moments(size):
    learned = _moments(12, size)
    errors = []
    for m in (500, 50_000):
        moments = moments_of(sample_rows(jax.random.key(2), learned, m), size)
        np.testing.assert_allclose(moments.mean, learned.mean, atol=30 / m**0.5)
        difference = moments.covariance - learned.covariance
        errors.append(jnp.linalg.norm(difference) / jnp.linalg.norm(moments.covariance))
    assert errors[1] < 0.02 and errors[1] < errors[0]


@pytest.mark.slow
def test_weights_converge_to_the_learned_covariances():
    normal = empty_weights(4, 6)
    for i in range(200):
        normal = update(normal, jax.random.normal(jax.random.key(i), (4, 6)) + 2.0)
    keys = jax.random.split(jax.random.key(7), 20_000)
    drawn = jax.vmap(lambda key: sample_weight(key, normal))(keys)
    flat = jnp.swapaxes(drawn, 1, 2).reshape(-1, 24)  # columns stacked
    exact = jnp.kron(normal.columns[0], normal.rows[0])
    error = jnp.linalg.norm(jnp.cov(flat.T) - exact) / jnp.linalg.norm(exact)
    assert error < 0.05


def test_the_same_key_draws_the_same():
    learned, normal = _moments(4, 4), update(empty_weights(4, 3), jnp.ones((4, 3)))
    draw = lambda key: (sample_rows(key, learned, 8), sample_weight(key, normal))  # noqa: E731
    first, again, other = (draw(jax.random.key(i)) for i in (0, 0, 1))
    chex.assert_trees_all_equal(first, again)
    assert not np.array_equal(first[0], other[0])


def test_what_has_no_variance_draws_its_mean():
    constant = moments_of(jnp.full((10, 3), 7.0), 3)
    for learned in (constant, empty_moments(3)):
        rows = sample_rows(jax.random.key(0), learned, 4)
        expected = jnp.broadcast_to(learned.mean, (4, 3))
        np.testing.assert_allclose(rows, expected, atol=1e-6)
    # One constant feature among others.
    rows = jax.random.normal(jax.random.key(0), (100, 3)).at[:, 1].set(2.0)
    drawn = sample_rows(jax.random.key(1), moments_of(rows, 3), 1000)
    np.testing.assert_allclose(drawn[:, 1], 2.0, atol=0.01)
