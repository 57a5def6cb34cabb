"""XLA's norm and activation, forward and backward, against plain float32."""

import functools

import chex
import jax
import numpy as np
import pytest

from loka_jax import fp8, quality, xla
from loka_jax.normed import (
    Epilogue,
    NormResiduals,
    NormVectors,
    xhat_scale_inv,
)
from loka_jax.xla.dense_norm import normalize
from tests import support
from tests.support import reference


# Every norm and every activation: each is differentiated on its own. Block norms have
# two whole blocks and a part of one.
@pytest.mark.parametrize(
    "norm, activation, n",
    [
        ("none", "relu", 96),
        ("layer", "swish", 96),
        ("rms", "gelu", 96),
        ("block", "hard_swish", 600),
        ("layer", "none", 96),
    ],
)
def test_values_and_gradients_are_those_of_the_equations(norm, activation, n):
    vectors = reference.vectors(n, norm, with_bias=True)
    epilogue = Epilogue(norm, activation)
    z, g = 2 * support.normal(8, n) + 0.5, support.normal(8, n, seed=1)
    z = z * 10.0 ** support.normal(1, n, seed=2)

    def plain(z, v):
        return reference.after_product(z, v, norm, activation)

    @jax.jit
    def results(z, vectors, g):
        ours = functools.partial(xla.norm_activation, epilogue=epilogue)
        y, pull = jax.vjp(lambda z, v: ours(z, NormVectors(**v)), z, vectors)
        expected, plain_pull = jax.vjp(plain, z, vectors)

        def backward(xhat, rstd):
            operands = g, NormResiduals(xhat, rstd), NormVectors(**vectors)
            return xla.norm_backward(*operands, epilogue=epilogue)

        # From the residuals of the forward pass, as they are and in E4M3.
        xhat, rstd = normalize(z + vectors["bias"][None], epilogue)
        stored = fp8.saturate(xhat / xhat_scale_inv(norm, n), fp8.E4M3)
        found = y, *pull(g), backward(xhat, rstd), backward(stored, rstd)
        return found, (expected, *plain_pull(g))

    (y, dz, dvectors, backward, rounded), expected = results(z, vectors, g)
    y_size, dz_size = (1 + np.abs(np.asarray(x)).max() for x in expected[:2])
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-4)
    close(y, expected[0], rtol=1e-5, atol=1e-6 * y_size)
    close(dz, expected[1], atol=1e-5 * dz_size)
    close(dvectors, expected[2], atol=1e-4)
    close(backward[0], expected[1], atol=1e-5 * dz_size)
    dgamma, dbeta = (expected[2].get(name) for name in ("gamma", "beta"))
    close(backward[1:], (dgamma, dbeta), atol=1e-4)
    if norm != "none":  # E4M3 rounds by 2^-4 at most: 0.026 in the mean square
        errors = jax.tree.map(quality.relative_l2, backward, rounded)
        assert max(jax.tree.leaves(errors)) < 0.037
