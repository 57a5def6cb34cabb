"""Launches of the Pallas kernels lowered for CUDA without a GPU.

Mosaic checks layouts and counts shared memory as it lowers a kernel.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import Epilogue, NormResiduals, Outputs
from loka_jax.pallas import dense_norm_layout, rows
from loka_jax.pallas import fm_lcb_backward_layout as backward_layout
from loka_jax.pallas import fm_lcb_layout as forward_layout
from loka_jax.pallas.dense_norm import dense_norm
from loka_jax.pallas.fm_lcb import fm_lcb
from loka_jax.pallas.fm_lcb_backward import fm_lcb_backward
from loka_jax.pallas.norm_backward import norm_backward
from loka_jax.pallas.norm_quantize import norm_quantize
from loka_jax.site import SiteSpec
from tests.support import pallas as support

BF16 = jnp.bfloat16
ROWWISE = Outputs(y=False, y_fp8="rowwise")
TRAINING = Outputs(y=True, y_fp8="tensorwise", xhat=E4M3, rstd=True, y_amax=True)


def lowers(f, *args):
    """Returns whether f, lowered for CUDA, contains a kernel."""
    lowered = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",))
    return "mosaic_gpu" in lowered.as_text()


def shape(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


# Rows in multiples of 64 and of 8; weights and columns that leave few configs.
@pytest.mark.parametrize(
    "m, k, n, norm, want",
    [
        (8192, 256, 256, "layer", TRAINING),
        (8192, 512, 256, "layer", ROWWISE),
        (5000, 512, 512, "layer", TRAINING),
        (8192, 192, 128, "none", Outputs(xhat=BF16)),
        (8192, 320, 256, "block", Outputs(xhat=BF16, rstd=True)),
    ],
)
def test_configs_of_dense_norm_lower(m, k, n, norm, want):
    spec = SiteSpec(m=m, k=k, n=n, norm=norm, activation="swish")
    flags = dict(has_affine=spec.has_affine, x_scale_by_row=True)
    problem = dense_norm_layout.Problem(spec=spec, dtype=E4M3, want=want, **flags)
    static = dict(epilogue=Epilogue(norm, "swish"), want=want)
    x, w = (shape(size, k, dtype=E4M3) for size in (m, n))

    def run(config, x, w, x_scale, scale):
        operands = Fp8Array(x, x_scale), Fp8Array(w, scale), support.affine(n, norm)
        y_scale_inv = scale if want.y_fp8 == "tensorwise" else None
        return dense_norm(*operands, y_scale_inv=y_scale_inv, config=config, **static)

    space = dense_norm_layout.search_space(problem) if want == ROWWISE else []
    for config in (dense_norm_layout.best_config(problem), *space):
        scales = shape(m, 1, dtype=jnp.float32), shape(dtype=jnp.float32)
        assert lowers(functools.partial(run, config), x, w, *scales)


@pytest.mark.parametrize(
    "n, norm, xhat, config",
    [
        (256, "rms", E4M3, None),
        (512, "block", E4M3, None),
        (1024, "layer", E4M3, None),
        (4096, "rms", E4M3, None),
        (512, "rms", BF16, rows.TuningConfig(8, 1, 3, 2, keep_vectors=False)),
        (512, "layer", BF16, rows.TuningConfig(32, 1, 5, 4)),
        (512, "rms", BF16, rows.TuningConfig(128, 1, 3, 6)),
        (1024, "none", BF16, rows.TuningConfig(16, 1, 0, 2)),
    ],
)
def test_configs_of_kernels_of_rows_lower(n, norm, xhat, config):
    m, vectors, epilogue = 49_999, support.affine(n, norm), Epilogue(norm, "swish")
    static = dict(epilogue=epilogue, config=config)
    want = Outputs(y=True, y_fp8="rowwise", xhat=BF16, rstd=norm != "none")
    f = functools.partial(norm_quantize, want=want, **static)
    assert lowers(f, shape(m, n), (), vectors)
    if config is None or config.lanes > 16:
        rstd = shape(*((n // 256, m) if norm == "block" else (m,)), dtype=jnp.float32)
        f = functools.partial(norm_backward, dz_fp8=E4M3, **static)
        residuals = NormResiduals(shape(m, n, dtype=xhat), rstd)
        assert lowers(f, shape(m, n), residuals, vectors)


@pytest.mark.parametrize("size", support.WUKONG)
def test_the_search_spaces_of_fm_lcb_lower(size):
    n, d, k, m = support.WUKONG[size]
    problem = forward_layout.Problem(batch=4096, n=n, d=d, k=k, m=m)
    x, weight = shape(4096, n, d), shape(n, m)
    for config in forward_layout.search_space(problem):
        assert lowers(functools.partial(fm_lcb, k=k, config=config), x, weight)
    if size == "S":  # which the backward pass does not serve
        return
    operands = x, weight, shape(4096, n, k), shape(4096, m - k, d)
    halves = (shape(4096, n // 2, d),) * 2
    for config in backward_layout.search_space(problem):
        launch = functools.partial(fm_lcb_backward, config=config)
        assert lowers(launch, *operands) and lowers(launch, *operands, halves)
