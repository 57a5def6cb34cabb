"""Statistics of elements against numpy in float64."""

import functools

import chex
import jax
import numpy as np
import pytest

from loka_jax import fp8
from loka_jax.probe import elements
from loka_jax.probe.elements import elements_of, empty_elements


@jax.jit
def _of(x, centre=0.0):
    return elements_of(x, fp8.cast(x, 1.0, fp8.E4M3), centre=centre)


_merge = jax.jit(elements.merge)


@jax.jit
def _of_cast(x, scale_inv):
    """Returns the statistics of an array and of its cast by a scale."""
    return elements_of(x, fp8.cast(x, scale_inv, fp8.E4M3))


@jax.jit
def _statistics(x):
    """Returns what an `Elements` says."""
    return {"count": x.count, **x.read()}


def _skewed(*shape, seed=0):
    values = np.random.default_rng(seed).gamma(2.0, 1.5, shape)
    return np.float32(values - 1)


def _check(found, x, rtol=1e-4):
    """Asserts that statistics are those of the elements of an array."""
    found, x = _statistics(found), x.astype(np.float64).ravel()
    kurtosis = np.mean((x - x.mean()) ** 4) / x.var() ** 2
    expected = x.size, x.mean(), x.std(), kurtosis, np.abs(x).max()
    names = "count", "mean", "deviation", "kurtosis", "amax"
    np.testing.assert_allclose([found[n] for n in names], expected, rtol=rtol)


@pytest.mark.parametrize("shift", [0.0, -5.0], ids=["positive", "negative"])
def test_elements_in_parts_give_the_elements_of_all(shift):
    x = _skewed(60, 5) + np.float32(shift)
    x[:20] *= 3  # parts of other means and spreads
    found = empty_elements()
    for part in np.split(x, [20, 25]):
        found = _merge(found, _of(part, found.mean))
    _check(found, x)
    np.testing.assert_allclose(_statistics(found)["last_amax"], np.abs(x[25:]).max())
    # An empty batch changes nothing.
    chex.assert_trees_all_close(_merge(found, empty_elements()), found, rtol=1e-6)


def test_a_centre_near_the_mean_keeps_the_digits_of_what_is_far_from_zero():
    x = _skewed(60, 5) + np.float32(3000)
    _check(_of(x, np.float32(3001)), x, rtol=1e-3)


def test_devices_together_give_the_elements_of_all():
    x = _skewed(3, 20, 5) * np.float32([3, 9, 1])[:, None, None]

    @functools.partial(jax.vmap, axis_name="data", out_axes=None)
    def together(x):
        return elements_of(x, fp8.cast(x, 0.1, fp8.E4M3), axis_names=("data",))

    found = jax.jit(together)(x)
    _check(found, x)
    told = _statistics(found)
    np.testing.assert_allclose(told["last_amax"], np.abs(x).max())
    np.testing.assert_allclose(told["amax_ratio"], np.abs(x).max() / 44.8, rtol=1e-6)
    clipped = np.mean(np.abs(x) > 44.8)
    assert clipped > 0
    np.testing.assert_allclose(told["saturation"], clipped, rtol=1e-6)


def test_what_a_cast_flushes_and_clips_is_counted():
    x = np.float32([[0.0, 1e-6, 1e-6, 1.0], [300.0, -900.0, 448.0, 2.0]])
    first = _of_cast(x, 1.0)
    later = _of_cast(x / 2, 1.0)
    assert _statistics(first)["underflow"] == 2 / 8
    assert _statistics(first)["saturation"] == 1 / 8  # 448 is in range
    both = _statistics(_merge(first, later))
    np.testing.assert_allclose(both["amax_ratio"], 450 / 448)
    np.testing.assert_allclose((both["amax"], both["last_amax"]), (900, 450))
    assert both["saturation"] == 2 / 16 and both["underflow"] == 4 / 16
    np.testing.assert_allclose(_statistics(_of_cast(x, 2.0))["amax_ratio"], 900 / 896)
