"""XLA's norm and activation, forward and backward, against numpy in float64."""

import functools

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose as assert_close

from loka_jax import fp8, quality, xla
from loka_jax.normed import Epilogue, NormResiduals, xhat_scale_inv
from loka_jax.xla.dense_norm import normalize
from tests import support
from tests.support import oracle, pallas


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
    epilogue, bias = Epilogue(norm, activation), support.normal(n, seed=5)
    vectors = pallas.affine(n, norm)._replace(bias=0.3 * bias)
    z, g = 2 * support.normal(8, n) + 0.5, support.normal(8, n, seed=1)
    z = z * 10.0 ** support.normal(1, n, seed=2)

    @jax.jit
    def results(z, vectors, g):
        run = lambda z, v: xla.norm_activation(z, v, epilogue=epilogue)  # noqa: E731
        y, pull = jax.vjp(run, z, vectors)

        def backward(xhat, rstd):
            operands = g, NormResiduals(xhat, rstd), vectors
            return xla.norm_backward(*operands, epilogue=epilogue)

        # From the residuals of the forward pass, as they are and in E4M3.
        xhat, rstd = normalize(z + vectors.bias[None], epilogue)
        stored = fp8.saturate(xhat / xhat_scale_inv(norm, n), fp8.E4M3)
        return y, *pull(g), backward(xhat, rstd), backward(stored, rstd)

    y, dz, dvectors, backward, rounded = results(z, vectors, g)
    z, exact_vectors, g = oracle.in_float64((z, vectors, g))
    xhat, rate = oracle.normalized(z + exact_vectors.bias, norm)
    exact, _ = oracle.activate(activation, oracle.affine(xhat, exact_vectors))
    args = g, xhat, rate, exact_vectors, norm, activation
    exact_dz, *terms = oracle.product_gradient(*args)
    sums = [t.sum(0) for t in (exact_dz, *terms)]
    sums = [None if v is None else t for v, t in zip(vectors, sums, strict=True)]
    size, dz_size = (1 + np.abs(x).max() for x in (exact, exact_dz))
    assert_close(y, exact, rtol=1e-5, atol=1e-6 * size)
    for found in (dz, backward[0]):
        assert_close(found, exact_dz, rtol=1e-4, atol=1e-5 * dz_size)
    sums_close = functools.partial(assert_close, rtol=1e-4, atol=1e-4)
    jax.tree.map(sums_close, [*dvectors, *backward[1:]], [*sums, *sums[1:]])
    if norm != "none":  # E4M3 rounds by 2^-4 at most: 0.026 in the mean square
        errors = jax.tree.map(quality.relative_l2, backward, rounded)
        assert max(jax.tree.leaves(errors)) < 0.037
