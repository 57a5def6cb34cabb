"""`norm_quantize` against numpy in float64, interpreted and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3
from loka_jax.normed import Epilogue, NormVectors, Outputs, xhat_scale_inv
from loka_jax.pallas.norm_quantize import (
    default_config,
    norm_quantize,
    why_not,
)
from loka_jax.pallas.rows import TuningConfig
from tests.support import pallas as support
from tests.support.pallas import interpret

__all__ = ["interpret"]

M = 64
EPSILON = 1e-3
ROW_SCALES = Outputs(y=True, y_fp8="rowwise", xhat=jnp.bfloat16, rstd=True, y_amax=True)
TENSOR_SCALE = Outputs(y=False, y_fp8="tensorwise", xhat=E4M3, rstd=False)
Y_SCALE_INV = 1 / 512  # saturates beyond 0.875
# Four tiles, two for each of the two SMs: the ring buffer wraps around.
SMALL = TuningConfig(lanes=8, pipeline_stages=1, warpgroups=1)

run = support.launcher(norm_quantize)


def _operands(n, norm, m=M):
    rng = np.random.default_rng(0)
    rows = np.exp(rng.uniform(-3, 3, (m, 1)))  # of different sizes
    z = rows * rng.standard_normal((m, n)) + rng.standard_normal((m, 1))
    bias = jnp.asarray(rng.standard_normal(n), jnp.float32)
    return jnp.asarray(z, jnp.bfloat16), support.affine(n, norm)._replace(bias=bias)


# The GPU's tanh is right to 5e-4 relative to 1, and so the activations in u.
def _tanh_error(y):
    return 6e-4 * np.max(np.abs(y)) if jax.default_backend() == "gpu" else 1e-5


def _check_rows(out, y, xhat, rstd):
    """Checks the outputs of `ROW_SCALES`."""
    error = _tanh_error(y)
    support.assert_bfloat16(out.y, y, error=error)
    support.assert_bfloat16(out.xhat, xhat, error=1e-5)
    support.assert_e4m3_rows(out.y_fp8, y, error=error)
    np.testing.assert_allclose(out.y_amax, np.abs(y).max(1), rtol=1e-5, atol=error)
    if rstd is not None:
        np.testing.assert_allclose(out.rstd, rstd, rtol=1e-4)


def _check_tensor(norm, out, y, xhat, rstd):
    """Checks the outputs of `TENSOR_SCALE`."""
    assert out.y is None and out.rstd is None and out.y_amax is None
    support.assert_fp8(out.y_fp8.data, Y_SCALE_INV, y, error=_tanh_error(y))
    if rstd is None:
        support.assert_bfloat16(out.xhat, xhat, error=1e-5)
    else:
        scale_inv = xhat_scale_inv(norm, xhat.shape[1])
        support.assert_fp8(out.xhat, scale_inv, xhat, error=1e-5)


def _check(run, n, norm, activation, want, config, *, m=M):
    z, vectors = _operands(n, norm, m)
    if norm == "none":  # which has no deviation, and z in bfloat16 for its xhat
        want = dataclasses.replace(want, rstd=False, xhat=jnp.bfloat16)
    epilogue = Epilogue(norm, activation, EPSILON)
    y_scale_inv = jnp.float32(Y_SCALE_INV) if want.y_fp8 == "tensorwise" else None
    rest = dict(want=want, y_scale_inv=y_scale_inv, config=config)
    out = run(z, (), vectors, epilogue=epilogue, **rest)
    check = _check_rows if want.y else functools.partial(_check_tensor, norm)
    check(out, *support.forward(z, vectors, epilogue))


# Every norm and every activation with all outputs; every activation with and without
# gamma and beta.
@pytest.mark.parametrize(
    "norm, activation, want",
    [
        ("none", "relu", ROW_SCALES),
        ("none", "gelu", TENSOR_SCALE),
        ("layer", "swish", ROW_SCALES),
        ("layer", "hard_swish", TENSOR_SCALE),
        support.slow("layer", "none", TENSOR_SCALE),
        ("rms", "gelu", ROW_SCALES),
        support.slow("rms", "relu", TENSOR_SCALE),
        ("block", "hard_swish", ROW_SCALES),
        support.slow("block", "none", ROW_SCALES),
        ("block", "swish", TENSOR_SCALE),
    ],
)
def test_outputs_are_the_rounded_reference(run, norm, activation, want):
    _check(run, 256, norm, activation, want, SMALL)


@pytest.mark.parametrize(
    "n, norm, config",
    [
        (128, "layer", None),
        (512, "rms", TuningConfig(lanes=32, rows=4, pipeline_stages=0, warpgroups=2)),
        (512, "layer", TuningConfig(16, rows=2, warpgroups=2, keep_vectors=False)),
        (512, "block", TuningConfig(16, rows=2, pipeline_stages=1, warpgroups=1)),
        (640, "layer", TuningConfig(lanes=32, rows=4, pipeline_stages=1)),
    ],
)
def test_widths_and_configs(run, n, norm, config):
    _check(run, n, norm, "swish", ROW_SCALES, config)


@pytest.mark.parametrize(
    "n, norm, want, stages",
    [
        support.slow(1536, "layer", ROW_SCALES, 2),
        (512, "rms", ROW_SCALES, 0),
    ],
)
def test_rows_over_all_warps(run, n, norm, want, stages):
    config = TuningConfig(lanes=128, pipeline_stages=stages, warpgroups=2)
    _check(run, n, norm, "hard_swish", want, config)


@pytest.mark.parametrize(
    "m, n, norm, config",
    [
        (65, 256, "layer", SMALL),
        (100, 512, "block", TuningConfig(16, rows=2, pipeline_stages=1, warpgroups=1)),
        (130, 512, "rms", TuningConfig(32, rows=4, pipeline_stages=0, warpgroups=2)),
        support.slow(200, 128, "none", None),
        support.slow(1000, 256, "layer", None),
        support.slow(65, 512, "rms", TuningConfig(lanes=128, warpgroups=2)),
    ],
)
def test_rows_beyond_the_last_whole_tile(run, m, n, norm, config):
    _check(run, n, norm, "swish", ROW_SCALES, config, m=m)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5000, 49_999])
@pytest.mark.parametrize(
    "n, norm", [(256, "layer"), (512, "rms"), (512, "block"), (1024, "layer")]
)
def test_any_number_of_rows_on_the_device(m, n, norm):
    _check(norm_quantize, n, norm, "swish", ROW_SCALES, None, m=m)


@pytest.mark.parametrize("config", [SMALL, TuningConfig(lanes=128, warpgroups=2)])
def test_scales_of_a_product_are_applied_first(run, config):
    z, vectors = _operands(512, "layer")
    scales = jnp.float32(0.25), jnp.float32(3.0), jnp.linspace(0.1, 4.0, M)[:, None]
    want = Outputs(y=True, rstd=True)
    epilogue = Epilogue("layer", "relu", EPSILON)
    out = run(z, scales, vectors, epilogue=epilogue, want=want, config=config)
    exact = np.asarray(z, np.float64) * 0.75 * np.asarray(scales[2], np.float64)
    y, _, rstd = support.forward(exact, vectors, epilogue)
    support.assert_bfloat16(out.y, y, error=1e-5)
    np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)


def test_no_vectors(run):
    z, _ = _operands(256, "layer")
    epilogue = Epilogue("layer", "swish", EPSILON)
    out = run(z, epilogue=epilogue, want=Outputs(y=True), config=SMALL)
    y, _, _ = support.forward(z, NormVectors(), epilogue)
    support.assert_bfloat16(out.y, y, error=_tanh_error(y))
    assert out.y_fp8 is None and out.xhat is None and out.rstd is None


def test_rows_of_zeros_and_rows_with_nan(run):
    z = jnp.ones((M, 256), jnp.bfloat16)
    z = z.at[3].set(0).at[5, 7].set(jnp.nan).at[6, 8].set(jnp.inf)
    want = Outputs(y=True, y_fp8="rowwise", y_amax=True)
    out = run(z, epilogue=Epilogue("rms", "relu"), want=want, config=SMALL)
    support.assert_faults_stay_in_their_rows(out.y_fp8, zeros=3, faulty=[5, 6])
    assert np.isnan(np.asarray(out.y_fp8.dequantize())[5]).all()
    # A maximum on the CPU, and so in the interpreter, may lose a NaN.
    assert jax.default_backend() == "cpu" or np.isnan(out.y_amax[5])


def test_a_large_mean_costs_no_digits(run):
    rng = np.random.default_rng(0)
    z = jnp.asarray(4096 + 32 * rng.integers(-1, 2, (M, 256)), jnp.bfloat16)
    epilogue = Epilogue("layer", epsilon=EPSILON)
    want = Outputs(y=False, xhat=jnp.bfloat16, rstd=True)
    out = run(z, epilogue=epilogue, want=want, config=SMALL)
    _, xhat, rstd = support.forward(z, NormVectors(), epilogue)
    np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)
    support.assert_bfloat16(out.xhat, xhat, error=1e-4)


@pytest.mark.gpu
def test_launches_repeat_bit_by_bit():
    z, vectors = _operands(1024, "layer")
    static = dict(epilogue=Epilogue("layer", "swish"), want=ROW_SCALES)
    f = functools.partial(norm_quantize, **static)
    support.assert_launches_repeat(f, jnp.tile(z, (64, 1)), (), vectors)


def _lowers(n, norm, config):
    z = jax.ShapeDtypeStruct((32768, n), jnp.bfloat16)
    want = Outputs(y=True, y_fp8="rowwise", xhat=jnp.bfloat16, rstd=norm != "none")
    static = dict(epilogue=Epilogue(norm, "swish"), want=want, config=config)
    f = functools.partial(norm_quantize, **static)
    return support.lowers(f, z, (), support.affine(n, norm))


SLOW_SHAPES = [(1152, "layer"), (2048, "none"), (4096, "rms")]


@pytest.mark.parametrize(
    "n, norm",
    [(256, "rms"), (512, "block"), (1024, "layer")]
    + [support.slow(*shape) for shape in SLOW_SHAPES],
)
def test_default_configs_lower_for_cuda(n, norm):
    assert _lowers(n, norm, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "n, norm, config",
    [
        (512, "rms", TuningConfig(8, 1, 3, 2, keep_vectors=False)),
        (512, "rms", TuningConfig(32, 2, 0, 4)),
        (512, "rms", TuningConfig(128, 1, 3, 6)),
        (1024, "none", TuningConfig(16, 1, 0, 2)),
    ],
)
def test_other_configs_lower_for_cuda(n, norm, config):
    assert _lowers(n, norm, config)


@pytest.mark.parametrize(
    "m, n, norm, reason",
    [
        (63, 512, "layer", "m=63 rows are fewer than 64"),
        (0, 512, "layer", "m=0"),
        (64, 100, "layer", "n=100"),
        (64, 2304, "block", "n=2304"),
        (64, 8192, "layer", "n=8192"),
        (64, 384, "block", "n=384"),
    ],
)
def test_refused_shapes_have_a_reason(m, n, norm, reason):
    assert reason in why_not(m, n, norm=norm)
    with pytest.raises(ValueError, match=reason):
        z = jnp.zeros((m, n), jnp.bfloat16)
        norm_quantize(z, epilogue=Epilogue(norm), want=Outputs())


def test_refused_configs_have_a_reason():
    refuse = functools.partial(why_not, 64, norm="layer")
    assert "shared memory" in refuse(4096, config=TuningConfig(pipeline_stages=4))
    assert "rows of a tile" in refuse(128, config=TuningConfig(lanes=8, rows=8))
    assert "multiple of 512" in refuse(1152, config=TuningConfig(lanes=128))


def test_default_configs_fit_every_served_shape():
    for norm in support.NORMS:
        for n in range(128, 4097, 128):
            if why_not(64, n, norm=norm) is None:
                config = default_config(n, norm=norm)
                assert why_not(64, n, norm=norm, config=config) is None
