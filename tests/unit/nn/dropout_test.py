"""Dropout by a hash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import nn
from tests import support

RATE, X = 0.2, support.normal(4, 256, 50, dtype=jnp.bfloat16)


def dropped(key, **options):
    module = nn.Dropout(RATE, **options)
    return module.apply({}, X, rngs={"dropout": jax.random.key(key)})


@pytest.mark.parametrize("key", range(3))
def test_a_share_is_zero_and_the_rest_is_divided(key):
    y = np.asarray(dropped(key), np.float32)
    kept = y != 0
    expected = np.asarray(X / (1 - RATE), np.float32)
    np.testing.assert_array_equal(y[kept], expected[kept])
    # Five deviations of the share, of all elements, and of each row and column.
    for axes in ((0, 1, 2), (0, 1), (2,)):
        share, count = np.mean(~kept, axis=axes), kept.size
        count = np.prod([X.shape[axis] for axis in axes])
        assert np.all(abs(share - RATE) < 5 * np.sqrt(RATE * (1 - RATE) / count))


def test_keys_decide():
    same, other = dropped(0), dropped(1)
    np.testing.assert_array_equal(dropped(0), same)
    both = np.mean((np.asarray(same) == 0) & (np.asarray(other) == 0))
    assert abs(both - RATE**2) < 5 * np.sqrt(RATE**2 / X.size)


def test_without_training_nothing_is_dropped():
    assert dropped(0, deterministic=True) is X
