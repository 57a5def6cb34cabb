"""Launches, references and checks of the Pallas kernels' tests.

The only module of the tests that imports `jax._src`: the interpreter's race detector
has no public name. References are numpy in float64. Each element must be one rounding
away from the exact value, besides an error that the caller names.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.normed import NO_VECTORS, NormVectors
from loka_jax.pallas import tiles

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
GELU_SCALE = np.sqrt(2 / np.pi)
NORMS = ("none", "layer", "rms", "block")


@pytest.fixture
def interpret(monkeypatch):
    """Yields the interpreter's parameters; two SMs make each CTA compute more tiles."""
    monkeypatch.setattr(tiles, "SMS", 2)
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    yield plgpu.InterpretGPUParams(detect_races=True)
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def assert_no_races():
    """Asserts that the race detector found no race so far."""
    races = interpret_pallas_call.get_races()
    assert races is None or not races.races_found


def interpreted(kernel, interpret):
    """Returns `kernel` as interpreted, with a check for races."""

    def run(*args, **kwargs):
        out = jax.block_until_ready(kernel(*args, **kwargs, interpret=interpret))
        assert interpret_pallas_call.get_races() is not None
        assert_no_races()
        return out

    return run


def launcher(kernel):
    """Returns a fixture that runs `kernel`, interpreted and on a GPU."""
    params = ["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)]

    @pytest.fixture(params=params)
    def run(request):
        if request.param == "on_gpu":
            return kernel
        return interpreted(kernel, request.getfixturevalue("interpret"))

    return run


def affine(n, norm, seed=0):
    """Returns the vectors gamma and beta of a norm."""
    if norm not in ("layer", "rms"):
        return NO_VECTORS
    gamma, beta = 0.3 * np.random.default_rng(seed).standard_normal((2, n))
    gamma, beta = (jnp.asarray(x, jnp.float32) for x in (1 + gamma, beta))
    return NormVectors(gamma=gamma, beta=beta)


def activate(name, u):
    """Returns the activations of float64 values."""
    match name:
        case "none":
            return u
        case "relu":
            return np.maximum(u, 0)
        case "swish":
            return u * (0.5 + 0.5 * np.tanh(u / 2))
        case "hard_swish":
            return u * np.clip(u / 6 + 0.5, 0, 1)
        case "gelu":
            return u * (0.5 + 0.5 * np.tanh(GELU_SCALE * (u + 0.044715 * u**3)))


def forward(z, vectors, epilogue):
    """Returns y, xhat and rstd in float64."""
    z, bias, gamma, beta = (
        default if x is None else np.asarray(x).astype(np.float64)
        for x, default in zip((z, *vectors), (None, 0.0, 1.0, 0.0), strict=True)
    )
    xhat, rstd = normalize(z + bias, epilogue.norm, epilogue.epsilon)
    return activate(epilogue.activation, gamma * xhat + beta), xhat, rstd


def normalize(z, norm, epsilon):
    """Returns xhat and the reciprocal deviations of z, None without a norm."""
    if norm == "none":
        return z, None
    m, n = z.shape
    blocks = z.reshape(m, -1, min(n, 256) if norm == "block" else n)
    if norm == "layer":
        blocks = blocks - blocks.mean(2, keepdims=True)
    rstd = 1 / np.sqrt((blocks**2).mean(2, keepdims=True) + epsilon)
    xhat = (blocks * rstd).reshape(m, n)
    return xhat, rstd[:, 0, 0] if rstd.shape[1] == 1 else rstd[:, :, 0].T


def assert_bfloat16(x, exact, *, error):
    """Asserts that x is the exact value rounded to bfloat16, within `error`."""
    _assert_rounded(x, exact, step=2**-8, error=error)


def assert_fp8(data, scale_inv, exact, *, error):
    """Asserts that `data * scale_inv` is the exact value rounded, within `error`."""
    info = jnp.finfo(data.dtype)
    scale_inv = np.asarray(scale_inv, np.float64)
    limit = float(info.max) * scale_inv
    x = np.asarray(data).astype(np.float64) * scale_inv
    # Besides the rounding of a subnormal.
    error = error + float(info.smallest_subnormal) / 2 * scale_inv
    step = float(info.eps) / 2
    _assert_rounded(x, np.clip(exact, -limit, limit), step=step, error=error)


def assert_e4m3_rows(x, exact, *, error):
    """Asserts that an Fp8Array is the exact value, each row under its own scale."""
    amax = np.abs(exact).max(1, keepdims=True)
    chex.assert_shape(x.scale_inv, amax.shape)
    least, scale_inv = amax / 448, np.asarray(x.scale_inv)
    assert np.all(scale_inv >= least - 1e-5 * least - error / 448)
    assert np.all(scale_inv <= 2 * least + 1e-5 * least + error / 224)
    assert_fp8(x.data, x.scale_inv, exact, error=error + 1e-5 * amax)


def _assert_rounded(x, exact, *, step, error):
    """Asserts that x is exact but for one rounding, of half the relative `step`."""
    difference = np.abs(np.asarray(x).astype(np.float64) - exact)
    allowed = 1.05 * step * np.abs(exact) + error
    assert np.all(difference <= allowed), np.max(difference / allowed)


def assert_faults_stay_in_their_rows(x, *, zeros, faulty):
    """Asserts that in an Fp8Array only some rows are not finite, and one is 0."""
    values = np.asarray(x.dequantize())
    is_faulty = np.isin(np.arange(len(values)), faulty)
    assert np.all(np.asarray(x.scale_inv)[~is_faulty] > 0)
    np.testing.assert_array_equal(values[zeros], 0)
    np.testing.assert_array_equal(np.isfinite(values).all(1), ~is_faulty)


def lowers(f, *args) -> bool:
    """Lowers f for CUDA without a GPU; returns whether it contains a kernel."""
    traced = jax.jit(f).trace(*args)
    return "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def assert_launches_repeat(f, *args):
    """Asserts that a thousand launches on a GPU agree bit by bit with the first."""
    f = jax.jit(f)
    first = f(*args)

    def bits(x):
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    @jax.jit
    def differing(out):
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(out), strict=True)
        return sum(jnp.sum(bits(x) != bits(y)) for x, y in pairs)

    total = jnp.int32(0)
    for _ in range(1000):
        total += differing(f(*args))
    assert total == 0
