"""The kernels that work by rows against numpy in float64, interpreted and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3, E5M2, fp8_max
from loka_jax.normed import Epilogue, NormVectors, Outputs
from loka_jax.pallas.norm_backward import norm_backward
from loka_jax.pallas.norm_quantize import norm_quantize
from loka_jax.pallas.rows import TuningConfig
from tests.support import pallas as support
from tests.support import row_kernels
from tests.support.pallas import interpret
from tests.support.row_kernels import BF16, ROW_SCALES, check_sums

__all__ = ["interpret"]

M = 64
TENSOR_SCALE = Outputs(y=False, y_fp8="tensorwise", xhat=E4M3, rstd=False)
# Four tiles, two for each of the two SMs: the ring buffer wraps around.
EIGHT_LANES = TuningConfig(lanes=8, pipeline_stages=1, warpgroups=1)
# One tile for each of two SMs.
SMALL = TuningConfig(rows=8, pipeline_stages=1, warpgroups=1)
LANES = TuningConfig(lanes=128, warpgroups=2)

quantize, differentiate = map(support.launcher, (norm_quantize, norm_backward))


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
    row_kernels.check_rows(quantize, m, n, norm, activation, want, config)


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
    epilogue = Epilogue("layer", epsilon=1e-3)
    want = Outputs(y=False, xhat=BF16, rstd=True)
    out = quantize(z, epilogue=epilogue, want=want, config=EIGHT_LANES)
    _, xhat, rstd = support.forward(z, NormVectors(), epilogue)
    np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)
    support.assert_bfloat16(out.xhat, xhat, error=1e-4)


# Gradients.


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
    args = differentiate, m, n, epilogue, xhat_dtype, config
    row_kernels.check_gradients(*args, dz_fp8=dz_fp8)


@pytest.mark.parametrize("norm, name", [("layer", "gamma"), ("none", "bias")])
def test_a_vector_that_comes_alone_has_its_gradient(differentiate, norm, name):
    n, epilogue = 256, Epilogue(norm, "swish")
    vectors = NormVectors(**{name: jnp.linspace(0.5, 2, n)})
    row_kernels.check_gradients(
        differentiate, 130, n, epilogue, BF16, SMALL, dz_fp8=None, vectors=vectors
    )


def test_zeros_and_nan_stay_in_rows_of_gradients(differentiate):
    dy, residuals, _ = row_kernels.gradients_of(512, "layer", BF16)
    dy = dy.at[3].set(0).at[5, 7].set(jnp.nan).at[6, 8].set(jnp.inf)
    rest = dict(epilogue=Epilogue("layer", "swish"), dz_fp8=E4M3, config=LANES)
    out = differentiate(dy, residuals, **rest)
    support.assert_faults_stay_in_their_rows(out.dz_fp8, zeros=3, faulty=[5, 6])


def test_a_scale_passed_in(differentiate):
    operands = row_kernels.gradients_of(512, "layer", E4M3)
    epilogue = Epilogue("layer", "swish")
    dz, *_ = support.backward(*operands, epilogue)
    # Too small by half: the largest values saturate.
    scale_inv = jnp.float32(np.abs(dz).max() / fp8_max(E5M2) / 2)
    scaling = dict(dz_fp8=E5M2, dz_scale_inv=scale_inv)
    out = differentiate(*operands, epilogue=epilogue, **scaling, config=LANES)
    rtol = row_kernels.slope_error()
    error = rtol * np.abs(dz).max(1, keepdims=True)
    support.assert_fp8(out.dz_fp8.data, scale_inv, dz, error=error)
    np.testing.assert_allclose(jnp.max(out.dz_amax), np.abs(dz).max(), rtol=rtol)


@pytest.mark.parametrize("m", [64, 130])
def test_every_row_is_summed_once(differentiate, m):
    check_sums(differentiate, m, TuningConfig(rows=2, pipeline_stages=1, warpgroups=2))
