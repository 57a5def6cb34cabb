"""The kernels that work by rows against numpy in float64, interpreted and on a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3, E5M2, fp8_max
from loka_jax.normed import (
    Epilogue,
    NormResiduals,
    NormVectors,
    Outputs,
    xhat_scale_inv,
)
from loka_jax.pallas.norm_backward import norm_backward
from loka_jax.pallas.norm_quantize import norm_quantize
from loka_jax.pallas.rows import TuningConfig
from tests.support import pallas as support
from tests.support.pallas import interpret

__all__ = ["interpret"]

BF16 = jnp.bfloat16
M = 64
EPSILON = 1e-3
ROW_SCALES = Outputs(y=True, y_fp8="rowwise", xhat=BF16, rstd=True, y_amax=True)
TENSOR_SCALE = Outputs(y=False, y_fp8="tensorwise", xhat=E4M3, rstd=False)
Y_SCALE_INV = 1 / 512  # saturates beyond 0.875
# Four tiles, two for each of the two SMs: the ring buffer wraps around.
EIGHT_LANES = TuningConfig(lanes=8, pipeline_stages=1, warpgroups=1)
# One tile for each of two SMs.
SMALL = TuningConfig(rows=8, pipeline_stages=1, warpgroups=1)
LANES = TuningConfig(lanes=128, warpgroups=2)

quantize, differentiate = map(support.launcher, (norm_quantize, norm_backward))


def rows_of(n, norm, m=M):
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
    epilogue, scaled = Epilogue(norm, activation, EPSILON), want.y_fp8 == "tensorwise"
    scales = jnp.float32(0.25), jnp.float32(3.0), jnp.linspace(0.5, 4.0, m)[:, None]
    options = dict(y_scale_inv=jnp.float32(Y_SCALE_INV) if scaled else None)
    out = quantize(
        z, scales, vectors, epilogue=epilogue, want=want, config=config, **options
    )
    exact = np.asarray(z, np.float64) * 0.75 * np.asarray(scales[2], np.float64)
    y, xhat, rstd = support.forward(exact, vectors, epilogue)
    error = _tanh_error(y)
    wanted = want.y, want.xhat, want.rstd, want.y_amax
    found = out.y, out.xhat, out.rstd, out.y_amax
    assert [bool(x) for x in wanted] == [x is not None for x in found]
    if want.y:
        support.assert_bfloat16(out.y, y, error=error)
        support.assert_e4m3_rows(out.y_fp8, y, error=error)
        np.testing.assert_allclose(out.y_amax, np.abs(y).max(1), rtol=1e-5, atol=error)
    else:
        support.assert_fp8(out.y_fp8.data, Y_SCALE_INV, y, error=error)
    if want.xhat == E4M3:
        support.assert_fp8(out.xhat, xhat_scale_inv(norm, n), xhat, error=1e-5)
    else:
        support.assert_bfloat16(out.xhat, xhat, error=1e-5 * (1 + np.abs(xhat)))
    if want.rstd:
        np.testing.assert_allclose(out.rstd, rstd, rtol=1e-4)


# Every norm and every activation with all outputs; every activation with and without
# gamma and beta; rows within a warp and over all warps; beyond the last whole tile;
# loads through a ring buffer and without.
@pytest.mark.parametrize(
    "m, n, norm, activation, want, config",
    [
        (64, 256, "none", "relu", ROW_SCALES, EIGHT_LANES),
        (64, 256, "none", "gelu", TENSOR_SCALE, EIGHT_LANES),
        (64, 256, "layer", "hard_swish", TENSOR_SCALE, EIGHT_LANES),
        (64, 256, "rms", "gelu", ROW_SCALES, EIGHT_LANES),
        (64, 256, "block", "swish", TENSOR_SCALE, EIGHT_LANES),
        (65, 256, "layer", "swish", ROW_SCALES, EIGHT_LANES),
        (200, 128, "none", "hard_swish", ROW_SCALES, None),
        (130, 512, "rms", "swish", ROW_SCALES, TuningConfig(32, 4, 0, 2)),
        (64, 512, "layer", "swish", ROW_SCALES, TuningConfig(16, 2, 3, 2, False)),
        (100, 512, "block", "none", ROW_SCALES, TuningConfig(16, 2, 1, 1)),
        (64, 640, "layer", "none", ROW_SCALES, TuningConfig(32, 4, 1)),
        (65, 512, "rms", "relu", TENSOR_SCALE, LANES),
        (64, 1536, "layer", "hard_swish", ROW_SCALES, TuningConfig(128, 1, 0, 2)),
    ],
)
def test_rows_are_the_rounded_reference(quantize, m, n, norm, activation, want, config):
    check_rows(quantize, m, n, norm, activation, want, config)


def test_zeros_and_nan_stay_in_their_rows(quantize):
    z = jnp.ones((M, 256), BF16)
    z = z.at[3].set(0).at[5, 7].set(jnp.nan).at[6, 8].set(jnp.inf)
    want = Outputs(y=True, y_fp8="rowwise", y_amax=True)
    out = quantize(z, epilogue=Epilogue("rms", "relu"), want=want, config=EIGHT_LANES)
    support.assert_faults_stay_in_their_rows(out.y_fp8, zeros=3, faulty=[5, 6])
    # A maximum on the CPU, and so in the interpreter, may lose a NaN.
    assert jax.default_backend() == "cpu" or np.isnan(out.y_amax[5])


def test_a_large_mean_costs_no_digits(quantize):
    rng = np.random.default_rng(0)
    z = jnp.asarray(4096 + 32 * rng.integers(-1, 2, (M, 256)), BF16)
    epilogue = Epilogue("layer", epsilon=EPSILON)
    want = Outputs(y=False, xhat=BF16, rstd=True)
    out = quantize(z, epilogue=epilogue, want=want, config=EIGHT_LANES)
    _, xhat, rstd = support.forward(z, NormVectors(), epilogue)
    np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)
    support.assert_bfloat16(out.xhat, xhat, error=1e-4)


# Gradients.


def gradients_of(n, norm, xhat_dtype, *, m=M):
    """Returns dy, the residuals and the vectors."""
    rng = np.random.default_rng(0)
    # Rows of very different size: one scale for all would lose the small ones.
    dy = np.logspace(0, -6, m)[:, None] * rng.standard_normal((m, n))
    z = 2 * rng.standard_normal((m, n)) + 0.3
    xhat, rstd = support.normalize(z, norm, 1e-6)
    rstd = None if rstd is None else jnp.asarray(rstd, jnp.float32)
    scale = 1 / xhat_scale_inv(norm, n) if xhat_dtype == E4M3 else 1.0
    xhat = jnp.asarray(scale * xhat, jnp.float32).astype(xhat_dtype)
    dy = jnp.asarray(dy, BF16)
    return dy, NormResiduals(xhat, rstd), support.affine(n, norm)


# The GPU's tanh is accurate to 5e-4 relative to 1, and slopes multiply it by u.
def _slope_error():
    return 2e-3 if jax.default_backend() == "gpu" else 1e-5


def check_gradients(
    run, m, n, epilogue, xhat_dtype, config, *, dz_fp8=E4M3, vectors=None
):
    """Checks all gradients of a launch, by default with the vectors of the norm."""
    operands = gradients_of(n, epilogue.norm, xhat_dtype, m=m)
    vectors = operands[2] if vectors is None else vectors
    operands = *operands[:2], vectors
    out = run(*operands, epilogue=epilogue, dz_fp8=dz_fp8, config=config)
    dz, dgamma, dbeta, gamma_size, beta_size = support.backward(*operands, epilogue)
    error = _slope_error() * np.abs(dz).max(1, keepdims=True)
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
            assert np.all(np.abs(got - exact) <= _slope_error() * size)


# Every norm and every activation with both dtypes of xhat; every activation with and
# without gamma and beta; rows within a warp and over all warps; rows beyond the last
# whole tile, repeated in the first, a middle or the last turn of a warpgroup; ring
# buffers that wrap around; warpgroups without a tile.
@pytest.mark.parametrize(
    "m, n, norm, activation, xhat_dtype, dz_fp8, config",
    [
        (64, 256, "none", "relu", BF16, E4M3, SMALL),
        (64, 256, "none", "gelu", BF16, None, SMALL),
        (64, 256, "layer", "gelu", E4M3, E4M3, SMALL),
        (64, 256, "rms", "hard_swish", BF16, E4M3, SMALL),
        (64, 256, "rms", "relu", E4M3, None, TuningConfig(32, 8, 2, 3)),
        (64, 256, "block", "hard_swish", E4M3, E4M3, SMALL),
        (64, 512, "block", "none", BF16, E4M3, TuningConfig(32, 2, 2, 3)),
        (65, 256, "layer", "swish", BF16, E4M3, SMALL),
        (100, 512, "block", "swish", E4M3, E4M3, TuningConfig(32, 2, 2, 2)),
        (130, 256, "rms", "swish", E4M3, E4M3, TuningConfig(32, 1, 3, 2)),
        (200, 128, "none", "swish", BF16, E4M3, None),
        (64, 640, "rms", "gelu", E4M3, E4M3, TuningConfig(32, 2, 2, 2, False)),
        (64, 1024, "layer", "none", E4M3, E4M3, TuningConfig(128, 1, 2, 2)),
    ],
)
def test_gradients_are_the_rounded_reference(
    differentiate, m, n, norm, activation, xhat_dtype, dz_fp8, config
):
    epilogue = Epilogue(norm, activation)
    check_gradients(differentiate, m, n, epilogue, xhat_dtype, config, dz_fp8=dz_fp8)


@pytest.mark.parametrize("norm, name", [("layer", "gamma"), ("none", "bias")])
def test_a_vector_that_comes_alone_has_its_gradient(differentiate, norm, name):
    n, epilogue = 256, Epilogue(norm, "swish")
    vectors = NormVectors(**{name: jnp.linspace(0.5, 2, n)})
    check_gradients(
        differentiate, 130, n, epilogue, BF16, SMALL, dz_fp8=None, vectors=vectors
    )


def test_zeros_and_nan_stay_in_rows_of_gradients(differentiate):
    dy, residuals, _ = gradients_of(512, "layer", BF16)
    dy = dy.at[3].set(0).at[5, 7].set(jnp.nan).at[6, 8].set(jnp.inf)
    rest = dict(epilogue=Epilogue("layer", "swish"), dz_fp8=E4M3, config=LANES)
    out = differentiate(dy, residuals, **rest)
    support.assert_faults_stay_in_their_rows(out.dz_fp8, zeros=3, faulty=[5, 6])


def test_a_scale_passed_in(differentiate):
    operands, epilogue = gradients_of(512, "layer", E4M3), Epilogue("layer", "swish")
    dz, *_ = support.backward(*operands, epilogue)
    # Too small by half: the largest values saturate.
    scale_inv = jnp.float32(np.abs(dz).max() / fp8_max(E5M2) / 2)
    scaling = dict(dz_fp8=E5M2, dz_scale_inv=scale_inv)
    out = differentiate(*operands, epilogue=epilogue, **scaling, config=LANES)
    error = _slope_error() * np.abs(dz).max(1, keepdims=True)
    support.assert_fp8(out.dz_fp8.data, scale_inv, dz, error=error)
    largest = jnp.max(out.dz_amax)
    np.testing.assert_allclose(largest, np.abs(dz).max(), rtol=_slope_error())


@pytest.mark.parametrize("m", [64, 130])
def test_every_row_is_summed_once(differentiate, m):
    check_sums(differentiate, m, TuningConfig(rows=2, pipeline_stages=1, warpgroups=2))


def check_sums(differentiate, m, config):
    """Checks sums of integers, which are exact: a row counted twice shows."""
    n, values = 256, 1 + jnp.arange(m, dtype=jnp.float32) % 251
    dy = jnp.broadcast_to(values[:, None], (m, n)).astype(BF16)
    residuals = NormResiduals(jnp.ones((m, n), BF16), jnp.ones(m))
    vectors = NormVectors(gamma=jnp.ones(n), beta=jnp.zeros(n))
    out = differentiate(dy, residuals, vectors, epilogue=Epilogue("rms"), config=config)
    np.testing.assert_array_equal(out.dbeta, jnp.sum(values))
    np.testing.assert_array_equal(out.dgamma, jnp.sum(values))
