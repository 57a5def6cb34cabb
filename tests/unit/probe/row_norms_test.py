"""Sizes of rows, counted and drawn."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.probe.moments import moments_of
from loka_jax.probe.row_norms import empty_norms, merge, norms_of, sample_scales
from loka_jax.probe.sampling import sample_rows
from loka_jax.probe.tails import tails_of

pytestmark = pytest.mark.slow

K = 32


def _heavy(m, seed=0):
    """Returns rows most of which are tiny, as gradients of a ranking model are."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.uniform(-12, 0, (m, 1)))
    return jnp.asarray(sizes * rng.standard_normal((m, K)), jnp.float32)


def test_parts_add_up():
    x, zero = _heavy(600), jnp.zeros(K)
    parts = merge(norms_of(x[:100], zero), norms_of(x[100:], zero))
    # Sums of squares in another order may fall on the other side of an edge.
    np.testing.assert_allclose(parts.counts, norms_of(x, zero).counts, atol=1)
    assert jnp.sum(parts.counts) == 600


def test_drawn_sizes_are_those_that_were_seen():
    norms = norms_of(_heavy(20_000), jnp.zeros(K))
    scales = sample_scales(jax.random.key(0), norms, 100_000)
    np.testing.assert_allclose(jnp.mean(scales**2), 1.0, rtol=0.03)
    octaves = np.log2(np.asarray(scales))
    quartiles = np.quantile(octaves, [0.1, 0.5, 0.9]) - np.quantile(octaves, 0.9)
    np.testing.assert_allclose(quartiles, [-9.6, -4.8, 0], atol=0.3)


@pytest.mark.slow
def test_draws_have_the_covariance_and_the_tails():
    x = _heavy(20_000) * jnp.linspace(0.1, 2.0, K)[None]
    moments, norms = moments_of(x, K), norms_of(x, jnp.zeros(K))
    drawn = sample_rows(jax.random.key(0), moments, 200_000, norms)
    covariance = moments_of(drawn, K).covariance
    error = jnp.linalg.norm(covariance - moments.covariance)
    assert error < 0.05 * jnp.linalg.norm(moments.covariance)
    real, plain = tails_of(x).kurtosis, sample_rows(jax.random.key(0), moments, 20_000)
    assert tails_of(plain).kurtosis < 0.5 * real
    np.testing.assert_allclose(tails_of(drawn).kurtosis, real, rtol=0.3)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e10])
def test_rows_of_any_size(size):
    norms = norms_of(jnp.full((10, K), size), jnp.zeros(K))
    assert jnp.sum(norms.counts) == 10
    scales = sample_scales(jax.random.key(0), norms, 1000)
    np.testing.assert_allclose(scales, 1.0, rtol=0.2)


def test_nothing_known_is_one_size():
    chex.assert_trees_all_equal(
        sample_scales(jax.random.key(0), empty_norms(), 5), jnp.ones(5)
    )
