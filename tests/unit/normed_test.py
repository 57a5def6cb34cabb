"""The constant scale of normalized rows in E4M3."""

import math

import pytest

from loka_jax.normed import xhat_scale_inv


@pytest.mark.parametrize(
    "norm, n, inverse",
    [
        ("rms", 64, 16),
        ("layer", 784, 16),
        ("layer", 785, 8),
        ("rms", 2048, 8),
        ("rms", 3136, 8),
        ("rms", 18432, 2),
        ("block", 18432, 16),
    ],
)
def test_the_loudest_element_of_a_row_fits(norm, n, inverse):
    assert 1 / xhat_scale_inv(norm, n) == inverse
    features = min(n, 256) if norm == "block" else n
    assert inverse * math.sqrt(features) <= 448  # the largest of E4M3
