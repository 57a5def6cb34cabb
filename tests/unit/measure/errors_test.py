"""What measuring on learned operands finds, and on N(0, 1) does not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8
from loka_jax.measure.errors import PAIRS, errors, measure
from loka_jax.measure.intervals import interval
from loka_jax.probe.matrix_normal import empty_weights, update
from loka_jax.probe.moments import moments_of
from loka_jax.probe.sampling import sample_rows, sample_weight

M, K, N = 64, 64, 64


def _product(x, w):
    return jnp.dot(x, w.T, precision="highest")


def _rowwise(x, w, fault=None):
    """Multiplies in FP8 with a scale a row of x (M, K) and of w (N, K)."""
    axes = (0,) if fault == "direction" else (1,)
    a, b = fp8.quantize(x, axes=(1,)), fp8.quantize(w, axes=axes)
    b_scale = b.scale_inv.reshape(-1, 1)
    if fault == "one block":
        b_scale = b_scale.at[16:32].set(b_scale[:16])
    out = _product(a.data.astype(jnp.float32), b.data.astype(jnp.float32))
    rows, columns = a.scale_inv, b_scale.T
    if fault == "swapped":
        rows, columns = columns.T, rows.T
    return out * rows * columns


def _score(x, w, fault=None):
    return errors(_product(x, w), _rowwise(x, w, fault))


@pytest.fixture(scope="module")
def learned():
    """Draws operands as training might leave them: of very different sizes."""
    features = jnp.exp(jax.random.normal(jax.random.key(0), (K,)))
    rows = jax.random.normal(jax.random.key(1), (2000, K)) * features[None]
    normal = empty_weights(N, K)
    units = jnp.exp2(jnp.linspace(6.0, -6.0, N))[:, None]
    for i in range(50):
        drift = jax.random.normal(jax.random.key(10 + i), (N, K))
        w = units * drift / features[None]
        normal = update(normal, w, momentum=0.9)
    moments = moments_of(rows, K)

    def draw(key):
        keys = jax.random.split(key)
        return sample_rows(keys[0], moments, M), sample_weight(keys[1], normal)

    return draw


def _gaussian(key):
    keys = jax.random.split(key)
    return jax.random.normal(keys[0], (M, K)), jax.random.normal(keys[1], (N, K))


def _mere(draw, fault=None):
    """Returns the median over draws: their mean is at the mercy of a few elements."""
    score = jax.jit(functools.partial(_score, fault=fault))
    found = measure(score, jax.jit(draw), jax.random.split(jax.random.key(5), PAIRS))
    return np.median(found.mere)


# What sound FP8 kernels show on N(0, 1) is 0.3 to 0.7.
_HEALTHY_MERE = 0.8


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["one block", "direction", "swapped"])
def test_a_faulty_kernel_is_caught_on_learned_operands_only(learned, fault):
    assert _mere(_gaussian) < _HEALTHY_MERE and _mere(learned) < _HEALTHY_MERE
    assert _mere(_gaussian, fault) < _HEALTHY_MERE
    assert _mere(learned, fault) > 2 * _HEALTHY_MERE


def test_intervals_hold_the_mean_and_shrink():
    values = np.random.default_rng(0).normal(5.0, 1.0, 4000)
    wide, narrow = interval(values[:40]), interval(values)
    for one in (wide, narrow):
        assert one.low < one.mean < one.high
    assert narrow.low < 5 < narrow.high
    assert narrow.high - narrow.low < (wide.high - wide.low) / 5
    assert np.isnan(interval(np.asarray([1.0, np.nan])).mean)
    assert interval(np.asarray([2.0])) == (2.0, 2.0, 2.0)


def test_errors_are_those_of_the_definitions():
    ref = jnp.asarray([[1.0, 2.0], [0.0, 4.0]])
    x = jnp.asarray([[1.1, 2.0], [0.5, 4.0]])
    found = errors(ref, x)
    np.testing.assert_allclose(found.mere, 0.1 / 3, rtol=1e-5)
    np.testing.assert_allclose(found.relative_l2, (0.26 / 21) ** 0.5, rtol=1e-5)
    np.testing.assert_allclose(found.median, 0.0)
    np.testing.assert_allclose(found.worst_row, 0.5 / 4, rtol=1e-5)
    exact = errors(ref, ref)
    assert exact.relative_l2 == exact.worst_row == exact.mere == 0


@pytest.mark.parametrize("columns", [96, 128])
def test_the_median_of_very_many_is_of_all_columns(columns):
    ref = jnp.ones((1 << 15, columns), jnp.float32)
    x = ref.at[:, 0].add(0.5).at[:, 1:].add(0.01)
    np.testing.assert_allclose(errors(ref, x).median, 0.01, rtol=1e-3)


def test_draws_are_reproducible_and_differ():
    found, again = (
        measure(_score, _gaussian, jax.random.split(jax.random.key(1), 4))
        for _ in range(2)
    )
    np.testing.assert_array_equal(found, again)
    assert len(set(found.relative_l2.tolist())) == 4
