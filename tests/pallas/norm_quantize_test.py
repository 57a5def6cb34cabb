"""`norm_quantize` against numpy in float64, interpreted and on a GPU."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.fp8 import E4M3
from loka_jax.normed import XHAT_SCALE_INV, Outputs
from loka_jax.pallas import tiles
from loka_jax.pallas.norm_quantize import (
    Settings,
    default_settings,
    norm_quantize,
    search_space,
    why_not,
)

M = 64 * 3
EPSILON = 1e-3
NORMS = ("none", "layer", "rms", "block")
ACTIVATIONS = ("none", "relu", "swish", "hard_swish", "gelu")
ROW_SCALES = Outputs(y=True, y_fp8="row", xhat=jnp.bfloat16, rstd=True, y_amax=True)
TENSOR_SCALE = Outputs(y=False, y_fp8="tensor", xhat=E4M3, rstd=False)
Y_SCALE_INV = 1 / 512  # saturates beyond 0.875


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def run(request, monkeypatch):
    """Runs the kernel; in the interpreter on two SMs, with the race detector."""
    if request.param == "on_gpu":
        yield norm_quantize
        return
    monkeypatch.setattr(tiles, "SMS", 2)
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    params = plgpu.InterpretGPUParams(detect_races=True)

    def interpreted(*args, **kwargs):
        out = norm_quantize(*args, **kwargs, interpret=params)
        jax.block_until_ready(out)
        assert not interpret_pallas_call.get_races().races_found
        return out

    yield interpreted
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def _operands(m, n, norm, *, bias=True, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.uniform(-3, 3, (m, 1)))  # of different sizes
    z = rows * rng.standard_normal((m, n)) + rng.standard_normal((m, 1))
    parameters = dict(bias=rng.standard_normal(n)) if bias else {}
    if norm in ("layer", "rms"):
        parameters["gamma"] = 1 + 0.3 * rng.standard_normal(n)
        parameters["beta"] = 0.3 * rng.standard_normal(n)
    parameters = {k: jnp.asarray(v, jnp.float32) for k, v in parameters.items()}
    return jnp.asarray(z, jnp.bfloat16), parameters


def _reference(z, *, bias=0.0, gamma=1.0, beta=0.0, norm, activation):
    """Returns y, xhat and rstd in float64."""
    z, bias, gamma, beta = (
        np.asarray(x).astype(np.float64) for x in (z, bias, gamma, beta)
    )
    z = z + bias
    m, n = z.shape
    rstd = None
    if norm != "none":
        blocks = z.reshape(m, -1, 256 if norm == "block" else n)
        if norm == "layer":
            blocks = blocks - blocks.mean(2, keepdims=True)
        rstd = 1 / np.sqrt((blocks**2).mean(2, keepdims=True) + EPSILON)
        z = (blocks * rstd).reshape(m, n)
        rstd = rstd[:, 0, 0] if rstd.shape[1] == 1 else rstd[:, :, 0].T
    u = gamma * z + beta
    cubic = np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)
    y = {
        "none": lambda: u,
        "relu": lambda: np.maximum(u, 0),
        "swish": lambda: u * (0.5 + 0.5 * np.tanh(u / 2)),
        "hard_swish": lambda: u * np.clip(u / 6 + 0.5, 0, 1),
        "gelu": lambda: u * (0.5 + 0.5 * np.tanh(cubic)),
    }[activation]()
    return y, z, rstd


def _assert_rounded(x, reference, *, step, floor):
    """Asserts that x is the reference within one rounding of relative size `step`.

    Args:
        x: what the kernel wrote.
        reference: exact values.
        step: half the distance of neighbours, relative.
        floor: absolute error allowed besides: of tanh, and of FP8 subnormals.
    """
    x = np.asarray(x).astype(np.float64)
    error = np.abs(x - reference)
    allowed = 1.05 * step * np.abs(reference) + floor
    assert np.all(error <= allowed), np.max(error / allowed)


# The GPU's tanh is right to 5e-4 relative to 1, and so the activations in u.
def _tanh_error(y):
    return 6e-4 * np.max(np.abs(y)) if jax.default_backend() == "gpu" else 1e-5


def _check_rows(out, reference):
    """Checks the outputs of `ROW_SCALES`."""
    y, xhat, rstd = reference
    tanh = _tanh_error(y)
    amax = np.abs(y).max(1)
    _assert_rounded(out.y, y, step=2**-8, floor=tanh)
    _assert_rounded(out.xhat, xhat, step=2**-8, floor=1e-5)
    np.testing.assert_allclose(out.y_amax, amax, rtol=1e-5, atol=tanh)
    scale_inv = np.asarray(out.y_fp8.scale_inv)
    chex.assert_shape(scale_inv, (y.shape[0], 1))
    np.testing.assert_allclose(scale_inv[:, 0], amax / 448, rtol=1e-5, atol=tanh)
    data = np.asarray(out.y_fp8.data).astype(np.float64)
    _assert_rounded(data * scale_inv, y, step=2**-4, floor=2**-10 * scale_inv + tanh)
    if rstd is not None:
        np.testing.assert_allclose(out.rstd, rstd, rtol=1e-4)


def _check_tensor(out, reference):
    """Checks the outputs of `TENSOR_SCALE`."""
    y, xhat, _ = reference
    assert out.y is None and out.rstd is None and out.y_amax is None
    _check_fp8(out.y_fp8.data, Y_SCALE_INV, y, error=_tanh_error(y))
    if out.xhat.dtype == E4M3:
        _check_fp8(out.xhat, XHAT_SCALE_INV, xhat, error=1e-5)
    else:
        _assert_rounded(out.xhat, xhat, step=2**-8, floor=1e-5)


def _check_fp8(data, scale_inv, exact, *, error):
    limit = 448 * scale_inv
    x = np.asarray(data).astype(np.float64) * scale_inv
    floor = 2**-10 * scale_inv + error
    _assert_rounded(x, np.clip(exact, -limit, limit), step=2**-4, floor=floor)


def _check(run, n, norm, activation, want, *, m=M, settings=None, bias=True):
    z, parameters = _operands(m, n, norm, bias=bias)
    if norm == "none":  # which has no deviation, and z in bfloat16 for its xhat
        xhat = None if want.xhat is None else jnp.bfloat16
        want = dataclasses.replace(want, rstd=False, xhat=xhat)
    y_scale_inv = jnp.float32(Y_SCALE_INV) if want.y_fp8 == "tensor" else None
    names = dict(norm=norm, activation=activation)
    out = run(
        z,
        **parameters,
        **names,
        epsilon=EPSILON,
        want=want,
        y_scale_inv=y_scale_inv,
        settings=settings,
    )
    reference = _reference(z, **parameters, **names)
    _check_rows(out, reference) if want.y else _check_tensor(out, reference)


# Six tiles, three for each of the two SMs: the ring comes round.
_SMALL = Settings(lanes=8, rows=2, stages=2, warpgroups=1)


@pytest.mark.parametrize("want", [ROW_SCALES, TENSOR_SCALE], ids=["row", "tensor"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_outputs_are_the_rounded_reference(run, norm, activation, want):
    _check(run, 256, norm, activation, want, settings=_SMALL)


@pytest.mark.parametrize(
    "n, norm, settings",
    [
        (128, "layer", None),
        (512, "rms", Settings(lanes=32, rows=4, stages=0, warpgroups=2)),
        (512, "layer", Settings(lanes=16, rows=2, warpgroups=2, resident=False)),
        (512, "block", Settings(lanes=16, rows=2, stages=1, warpgroups=2)),
        (640, "layer", Settings(lanes=32, rows=4, stages=1)),
        (1024, "layer", Settings(lanes=32, rows=4, warpgroups=2)),
    ],
)
def test_widths_and_settings(run, n, norm, settings):
    _check(run, n, norm, "swish", ROW_SCALES, settings=settings)


@pytest.mark.parametrize(
    "n, norm, want, stages",
    [
        (1536, "layer", ROW_SCALES, 2),
        (1024, "rms", TENSOR_SCALE, 0),
    ],
)
def test_rows_over_all_warps(run, n, norm, want, stages):
    settings = Settings(lanes=128, warpgroups=2, stages=stages)
    _check(run, n, norm, "hard_swish", want, m=64, settings=settings)


@pytest.mark.parametrize("settings", [_SMALL, Settings(lanes=128, warpgroups=2)])
def test_scales_of_a_product_are_applied_first(run, settings):
    n = 512
    z, parameters = _operands(M, n, "layer")
    scales = jnp.float32(0.25), jnp.float32(3.0), jnp.linspace(0.1, 4.0, M)[:, None]
    want = Outputs(y=True, rstd=True)
    names = dict(norm="layer", activation="relu")
    rest = dict(epsilon=EPSILON, want=want, settings=settings)
    out = run(z, scales=scales, **parameters, **names, **rest)
    exact = np.asarray(z, np.float64) * 0.75 * np.asarray(scales[2], np.float64)
    y, _, rstd = _reference(exact, **parameters, **names)
    _assert_rounded(out.y, y, step=2**-8, floor=1e-5)
    np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)


def test_no_parameters(run):
    z, _ = _operands(M, 256, "layer")
    want = Outputs(y=True)
    names = dict(norm="layer", activation="swish")
    out = run(z, **names, epsilon=EPSILON, want=want, settings=_SMALL)
    y, _, _ = _reference(z, **names)
    _assert_rounded(out.y, y, step=2**-8, floor=_tanh_error(y))
    assert out.y_fp8 is None and out.xhat is None and out.rstd is None


def test_rows_of_zeros_and_rows_with_nan(run):
    z = np.ones((64, 256), np.float32)
    z[3] = 0
    z[5, 7] = np.nan
    z[6, 8] = np.inf
    z = jnp.asarray(z, jnp.bfloat16)
    want = Outputs(y=True, y_fp8="row", y_amax=True)
    out = run(z, norm="rms", activation="relu", want=want, settings=_SMALL)
    values = np.asarray(out.y_fp8.dequantize())
    bad = np.isin(np.arange(64), [5, 6])
    assert np.all(np.asarray(out.y_fp8.scale_inv)[~bad] > 0)
    np.testing.assert_array_equal(values[3], 0)
    np.testing.assert_array_equal(np.isfinite(values).all(1), ~bad)
    assert np.isnan(values[5]).all()
    # A maximum on the CPU, and so in the interpreter, may lose a NaN.
    assert jax.default_backend() == "cpu" or np.isnan(out.y_amax[5])


def test_a_large_mean_costs_no_digits(run):
    rng = np.random.default_rng(0)
    z = jnp.asarray(4096 + 32 * rng.integers(-1, 2, (64, 256)), jnp.bfloat16)
    names = dict(norm="layer", activation="none")
    want = Outputs(y=False, xhat=jnp.bfloat16, rstd=True)
    out = run(z, **names, epsilon=EPSILON, want=want, settings=_SMALL)
    _, xhat, rstd = _reference(z, **names)
    np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)
    _assert_rounded(out.xhat, xhat, step=2**-8, floor=1e-4)


@pytest.mark.gpu
def test_launches_repeat_bit_by_bit():
    z, parameters = _operands(4096, 1024, "layer")
    names = dict(norm="layer", activation="swish", want=ROW_SCALES)
    f = jax.jit(functools.partial(norm_quantize, **names))
    first = jax.tree.map(np.asarray, f(z, **parameters))
    for _ in range(1000):
        again = f(z, **parameters)
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, again), first)


SHAPES = [(128, "layer"), (256, "rms"), (512, "block"), (1024, "layer")]
SHAPES += [(1152, "layer"), (2048, "none"), (4096, "rms")]


@pytest.mark.parametrize("n, norm", SHAPES)
def test_all_settings_lower_for_cuda(n, norm):
    space = search_space(32768, n, norm=norm)
    shape = jax.ShapeDtypeStruct
    z, columns = shape((32768, n), jnp.bfloat16), shape((n,), jnp.float32)
    parameters = dict(gamma=columns, beta=columns) if norm in ("layer", "rms") else {}
    want = Outputs(y=True, y_fp8="row", xhat=jnp.bfloat16, rstd=norm != "none")
    for settings in space:
        f = functools.partial(
            norm_quantize, norm=norm, activation="swish", want=want, settings=settings
        )
        lowered = jax.jit(f).trace(z, **parameters).lower(lowering_platforms=("cuda",))
        assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize(
    "m, n, norm, reason",
    [
        (100, 512, "layer", "m=100"),
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
        norm_quantize(z, norm=norm, activation="none", want=Outputs())


def test_refused_settings_have_a_reason():
    refuse = functools.partial(why_not, 64, norm="layer")
    assert "shared memory" in refuse(4096, settings=Settings(stages=4))
    assert "rows of a tile" in refuse(256, settings=Settings(lanes=8, rows=8))
    assert "multiple of 512" in refuse(1152, settings=Settings(lanes=128))
    for norm in NORMS:
        for n in range(128, 4097, 128):
            if why_not(64, n, norm=norm) is None:
                settings = default_settings(64, n, norm=norm)
                assert why_not(64, n, norm=norm, settings=settings) is None
