"""Tails of operands against numpy in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from loka_jax import fp8
from loka_jax.probe.tails import empty_tails, merge, merge_over_devices, tails_of
from tests.support import slow_except

pytestmark = pytest.mark.slow


def _skewed(size, seed=0):
    return jnp.asarray(np.random.default_rng(seed).gamma(2.0, 1.5, size), jnp.float32)


def _kurtosis(x):
    off = np.asarray(x, np.float64) - np.mean(np.asarray(x, np.float64))
    return np.mean(off**4) / np.mean(off**2) ** 2


@pytest.mark.parametrize("seed", slow_except(range(3), 0))
def test_any_split_gives_the_tails_of_all(seed):
    x = _skewed(4000)
    cuts = np.sort(np.random.default_rng(seed).integers(0, 4000, 5))
    tails = empty_tails()
    for part in np.split(np.asarray(x), cuts):
        if part.size:
            batch = tails_of(jnp.asarray(part)[:, None], centre=tails.mean)
            tails = merge(tails, batch)
    np.testing.assert_allclose(tails.kurtosis, _kurtosis(x), rtol=1e-3)
    np.testing.assert_allclose(tails.last_amax, x[cuts[-1] :].max())
    np.testing.assert_allclose(tails.amax, x.max())
    for name in ("count", "mean", "variance", "kurtosis"):
        value, expected = getattr(tails, name), getattr(tails_of(x[:, None]), name)
        np.testing.assert_allclose(value, expected, rtol=1e-3)


def test_a_gaussian_has_kurtosis_three():
    x = jax.random.normal(jax.random.key(0), (200, 500)) * 3 + 10
    np.testing.assert_allclose(tails_of(x).kurtosis, 3.0, atol=0.1)
    np.testing.assert_allclose(tails_of(jnp.ones((5, 2))).kurtosis, 0.0)


def test_devices_together_give_the_tails_of_all():
    x = _skewed((8, 300))
    mesh = Mesh(np.asarray(jax.devices()[:8]), ("data",))

    def together(x):
        return merge_over_devices(tails_of(x), ("data",))

    spread = jax.shard_map(
        together,
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    spread_tails = jax.jit(spread)(x)
    chex.assert_trees_all_close(spread_tails, tails_of(x), rtol=1e-3)


def test_what_a_cast_flushes_and_clips_is_counted():
    x = jnp.asarray([[0.0, 1e-6, 1e-6, 1.0], [300.0, -900.0, 448.0, 2.0]])
    scale_inv = jnp.float32(1.0)
    tails = tails_of(x, fp8.cast(x, scale_inv, fp8.E4M3))
    np.testing.assert_allclose(tails.underflow_rate, 2 / 8)
    np.testing.assert_allclose(tails.saturation_rate, 1 / 8)
    np.testing.assert_allclose(tails.amax_ratio, 900 / 448)
    later = tails_of(x / 2, fp8.cast(x / 2, scale_inv, fp8.E4M3))
    both = merge(tails, later)
    np.testing.assert_allclose(both.amax_ratio, 450 / 448)
    np.testing.assert_allclose(both.amax, 900)
    np.testing.assert_allclose(both.saturation_rate, 2 / 16)
