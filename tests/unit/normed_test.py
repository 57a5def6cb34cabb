"""The constant scales of normalized rows and of what follows them."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.normed import Epilogue, bounded_scale_inv, norm_features, xhat_scale_inv


@pytest.mark.parametrize(
    "norm, n, inverse",
    [
        ("rms", 64, 16),
        ("layer", 784, 16),
        ("layer", 785, 8),
        ("rms", 18432, 2),
        ("block", 18432, 16),
    ],
)
def test_the_loudest_element_of_a_row_fits(norm, n, inverse):
    assert 1 / xhat_scale_inv(norm, n) == inverse
    assert norm_features(norm, n) == (min(n, 256) if norm == "block" else n)
    assert inverse * math.sqrt(norm_features(norm, n)) <= 448  # the largest of E4M3


@pytest.mark.parametrize("norm, features", [("layer", 400), ("block", 256)])
def test_a_bounded_scale_holds_what_gamma_and_beta_make_of_the_loudest(norm, features):
    gamma, beta = np.zeros((2, 400), np.float32)
    gamma[7], beta[7], beta[9] = -3, -5, 11
    bound = 3 * math.sqrt(features)
    for *vectors, expected in (
        (None, None, math.sqrt(features)),
        (gamma, None, bound),
        (gamma, beta, bound + 5),
        (gamma / 1e6, beta, 11),  # of its own, without a normalized element
        (np.zeros_like(gamma), None, 448e-30),
    ):
        arrays = (None if v is None else jnp.asarray(v) for v in vectors)
        arrays = [*arrays]
        found = bounded_scale_inv(Epilogue(norm, "relu"), 400, *arrays)
        np.testing.assert_allclose(448 * found, expected, rtol=1e-6)
        found = bounded_scale_inv(Epilogue(norm, "sigmoid"), 400, *arrays)
        np.testing.assert_allclose(448 * found, max(expected, 1), rtol=1e-6)
