"""Error measures of an array against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import quality
from tests import support

MEASURES = {
    "sqnr": quality.sqnr,
    "worst": quality.worst_row,
    "relative_l2": quality.relative_l2,
    "mere": quality.mere,
}


@jax.jit
def measured(ref, x):
    """Returns all measures of an array."""
    return {name: measure(ref, x) for name, measure in MEASURES.items()}


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
def test_measures_do_not_depend_on_the_size_of_the_array(size):
    ref = size * support.normal(64, 48)
    found = {name: float(value) for name, value in measured(ref, 1.1 * ref).items()}
    expected = dict(sqnr=20, worst=0.1, relative_l2=0.1, mere=0.1)
    assert found == pytest.approx(expected, rel=1e-4)


def test_equal_arrays_have_no_noise_and_a_nan_is_seen_in_every_measure():
    # Large enough for a reduction in which XLA for CPUs loses a NaN.
    ones, zeros = np.ones((64, 48), np.float32), np.zeros((64, 48), np.float32)
    for ref in (ones, zeros):
        expected = dict(sqnr=np.inf, worst=0, relative_l2=0, mere=0)
        assert measured(ref, ref) == expected
    bad = ones.copy()
    bad[0, 0] = np.nan
    for name, value in measured(ones, bad).items():
        assert jnp.isnan(value), name


def test_measures_of_few_numbers_by_hand():
    x = jnp.float32([[0, 0], [3, 4]])
    steps = jnp.float32([[1, 1], [0, 0.5]])
    found = [
        quality.worst_row(x, x + steps),
        quality.mere(x, x + steps),
        quality.sqnr(x, x + steps),
        quality.relative_l2(x, x + steps),
    ]
    # sqrt(0.25 / 25): rows of zeros are left out, as zeros of the reference are.
    expected = [0.1, 0.125 / 2, 10 * np.log10(25 / 2.25), 1.5 / 5]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
