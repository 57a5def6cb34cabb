"""One small interpreted case of the kernels that work by rows; others are in whole."""

import functools

import jax.numpy as jnp
import numpy as np

from loka_jax.fp8 import E4M3
from loka_jax.normed import XHAT_SCALE_INV, Epilogue, NormResiduals, Outputs
from loka_jax.pallas.norm_backward import norm_backward
from loka_jax.pallas.norm_quantize import norm_quantize
from loka_jax.pallas.rows import TuningConfig
from tests.support import pallas as support
from tests.support.pallas import interpret

__all__ = ["interpret"]

# Nine tiles of rows, the last of which repeats some, for two SMs.
M, N, CONFIG = 68, 128, TuningConfig(rows=2, pipeline_stages=1, warpgroups=1)
EPILOGUE = Epilogue("layer", "swish", 1e-3)


def test_rows_are_normalized_quantized_and_differentiated(interpret):
    draw = np.random.default_rng(0).standard_normal
    rows = np.logspace(1, -2, M)[:, None]  # of different sizes
    z, dy = (jnp.asarray(rows * draw((M, N)), jnp.bfloat16) for _ in range(2))
    z_scales = jnp.float32(0.25), jnp.linspace(0.5, 4.0, M)[:, None]
    bias = jnp.asarray(draw(N), jnp.float32)
    vectors = support.affine(N, "layer")._replace(bias=bias)
    rest = dict(epilogue=EPILOGUE, config=CONFIG)
    run = functools.partial(support.interpreted, interpret=interpret)
    want = Outputs(y=True, y_fp8="rowwise", xhat=E4M3, rstd=True, y_amax=True)
    out = run(norm_quantize)(z, z_scales, vectors, want=want, **rest)
    exact = np.asarray(z, np.float64) * 0.25 * np.asarray(z_scales[1], np.float64)
    y, xhat, rstd = support.forward(exact, vectors, EPILOGUE)
    support.assert_bfloat16(out.y, y, error=1e-5)
    support.assert_e4m3_rows(out.y_fp8, y, error=1e-5)
    support.assert_fp8(out.xhat, XHAT_SCALE_INV, xhat, error=1e-5)
    np.testing.assert_allclose(out.rstd, rstd, rtol=1e-4)
    np.testing.assert_allclose(out.y_amax, np.abs(y).max(1), rtol=1e-5, atol=1e-5)
    residuals, vectors = NormResiduals(out.xhat, out.rstd), vectors._replace(bias=None)
    gradients = run(norm_backward)(dy, residuals, vectors, dz_fp8=E4M3, **rest)
    dz, *sums = support.backward(dy, residuals, vectors, EPILOGUE)
    error = 1e-5 * np.abs(dz).max(1, keepdims=True)
    support.assert_bfloat16(gradients.dz, dz, error=error)
    support.assert_e4m3_rows(gradients.dz_fp8, dz, error=error)
    dgamma, dbeta, gamma_size, beta_size = sums
    assert np.all(np.abs(gradients.dgamma - dgamma) <= 1e-5 * gamma_size)
    assert np.all(np.abs(gradients.dbeta - dbeta) <= 1e-5 * beta_size)
