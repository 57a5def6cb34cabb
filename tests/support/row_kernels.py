"""The Pallas kernels of rows: operands, and checks of all results against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.fp8 import E4M3
from loka_jax.normed import (
    Epilogue,
    NormResiduals,
    NormVectors,
    Outputs,
    xhat_scale_inv,
)
from tests.support import oracle
from tests.support import pallas as support

BF16 = jnp.bfloat16
ROW_SCALES = Outputs(y=True, y_fp8="rowwise", xhat=BF16, rstd=True, y_amax=True)
Y_SCALE_INV = 1 / 512  # saturates beyond 0.875


def rows_of(n, norm, m=64):
    """Returns z and the vectors."""
    rng = np.random.default_rng(0)
    rows = np.exp(rng.uniform(-3, 3, (m, 1)))  # of different sizes
    z = rows * rng.standard_normal((m, n)) + rng.standard_normal((m, 1))
    bias = jnp.asarray(rng.standard_normal(n), jnp.float32)
    return jnp.asarray(z, BF16), support.affine(n, norm)._replace(bias=bias)


# The GPU's tanh is right to 5e-4 relative to 1, and so the activations in u.
def _tanh_error(y):
    return 6e-4 * np.max(np.abs(y)) if jax.default_backend() == "gpu" else 1e-5


def check_rows(quantize, m, n, norm, activation, want, config):
    """Checks all outputs of a launch, of a product that was not scaled yet."""
    z, vectors = rows_of(n, norm, m)
    if norm == "none":  # which has no deviation, and z in bfloat16 for its xhat
        want = dataclasses.replace(want, rstd=False, xhat=BF16)
    epilogue, scaled = Epilogue(norm, activation, 1e-3), want.y_fp8 == "tensorwise"
    scales = jnp.float32(0.25), jnp.float32(3.0), jnp.linspace(0.5, 4.0, m)[:, None]
    options = dict(y_scale_inv=jnp.float32(Y_SCALE_INV) if scaled else None)
    out = quantize(
        z, scales, vectors, epilogue=epilogue, want=want, config=config, **options
    )
    exact = np.asarray(z, np.float64) * 0.75 * np.asarray(scales[2], np.float64)
    y, xhat, rstd = support.forward(exact, vectors, epilogue)
    xhat_error = 1e-5 if want.xhat == E4M3 else 1e-5 * (1 + np.abs(xhat))
    rest = dict(error=_tanh_error(y), xhat_error=xhat_error, rtol=1e-4, amax_rtol=1e-5)
    exact = y, xhat, rstd
    support.assert_outputs(out, want, exact, y_scale_inv=Y_SCALE_INV, **rest)


def gradients_of(n, norm, xhat_dtype, *, m=64):
    """Returns dy, the residuals and the vectors."""
    rng = np.random.default_rng(0)
    # Rows of very different size: one scale for all would lose the small ones.
    dy = np.logspace(0, -6, m)[:, None] * rng.standard_normal((m, n))
    z = 2 * rng.standard_normal((m, n)) + 0.3
    xhat, rate = oracle.normalized(z, norm)
    rstd = support.rstd_of(rate, norm)
    rstd = None if rstd is None else jnp.asarray(rstd, jnp.float32)
    scale = 1 / xhat_scale_inv(norm, n) if xhat_dtype == E4M3 else 1.0
    xhat = jnp.asarray(scale * xhat, jnp.float32).astype(xhat_dtype)
    dy = jnp.asarray(dy, BF16)
    return dy, NormResiduals(xhat, rstd), support.affine(n, norm)


# The GPU's tanh is accurate to 5e-4 relative to 1, and slopes multiply it by u.
def slope_error():
    return 2e-3 if jax.default_backend() == "gpu" else 1e-5


def check_gradients(
    run, m, n, epilogue, xhat_dtype, config, *, dz_fp8=E4M3, vectors=None
):
    """Checks all gradients of a launch, by default with the vectors of the norm."""
    *operands, own = gradients_of(n, epilogue.norm, xhat_dtype, m=m)
    vectors = own if vectors is None else vectors
    operands = *operands, vectors
    out = run(*operands, epilogue=epilogue, dz_fp8=dz_fp8, config=config)
    dz, dgamma, dbeta, gamma_size, beta_size = support.backward(*operands, epilogue)
    error = slope_error() * np.abs(dz).max(1, keepdims=True)
    support.assert_bfloat16(out.dz, dz, error=error)
    if dz_fp8 is None:
        assert out.dz_fp8 is None
    else:
        support.assert_e4m3_rows(out.dz_fp8, dz, error=error)
    for got, vector, exact, size in (
        (out.dgamma, vectors.gamma, dgamma, gamma_size),
        (out.dbeta, vectors.beta, dbeta, beta_size),
        (out.dbias, vectors.bias, dbeta, beta_size),
    ):
        assert (got is None) == (vector is None)
        if got is not None:
            assert got.shape == (n,)
            assert np.all(np.abs(got - exact) <= slope_error() * size)


def check_sums(differentiate, m, config):
    """Checks sums of integers, which are exact: a row counted twice shows."""
    n, values = 256, 1 + jnp.arange(m, dtype=jnp.float32) % 251
    dy = jnp.broadcast_to(values[:, None], (m, n)).astype(BF16)
    residuals = NormResiduals(jnp.ones((m, n), BF16), jnp.ones(m))
    vectors = NormVectors(gamma=jnp.ones(n), beta=jnp.zeros(n))
    out = differentiate(dy, residuals, vectors, epilogue=Epilogue("rms"), config=config)
    np.testing.assert_array_equal(out.dbeta, jnp.sum(values))
    np.testing.assert_array_equal(out.dgamma, jnp.sum(values))
