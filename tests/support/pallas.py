"""Launches, references and checks of the Pallas kernels' tests.

The interpreter's race detector has no public name. References are numpy in float64:
each element must be one rounding away from them, besides an error the caller names.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import NO_VECTORS, NormVectors, xhat_scale_inv
from loka_jax.pallas import tiles

GELU_SCALE = np.sqrt(2 / np.pi)
NORMS = ("none", "layer", "rms", "block")
# n, d, k, m of Wukong S, M and L.
WUKONG = {"S": (40, 64, 24, 40), "M": (64, 128, 32, 64), "L": (96, 160, 48, 96)}


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


def shapes_of(fields):
    """Returns the shapes of arrays, (barriers, arrivals) of barriers, by name."""
    fields = fields if isinstance(fields, dict) else fields._asdict()

    def shape(item):
        if isinstance(item, plgpu.Barrier):
            return int(np.prod(item.num_barriers)), item.num_arrivals
        return item.shape

    return {name: shape(item) for name, item in fields.items() if item is not None}


def quantized(x, tile=None, dtype=E4M3):
    """Returns a matrix in FP8 by numpy, and the float64 values that it stands for.

    By default one power-of-two scale serves all; rows of (1, columns) have one each.
    """
    x = np.asarray(x, np.float64)
    (m, k), (rows, columns) = x.shape, tile or x.shape
    amax = np.maximum.reduceat(np.abs(x), range(0, m, rows), axis=0)
    amax = np.maximum.reduceat(amax, range(0, k, columns), axis=1)
    limit = float(jnp.finfo(dtype).max)
    factors = 2.0 ** np.ceil(np.log2(amax / limit))
    scale_inv = np.repeat(np.repeat(factors, rows, axis=0), columns, axis=1)[:m, :k]
    data = (x / scale_inv).astype(np.float32).astype(dtype)
    factors = factors.astype(np.float32)[() if factors.size > 1 else (0, 0)]
    tile = None if columns == k else tile
    x8 = Fp8Array(jnp.asarray(data), jnp.asarray(factors), tile)
    return x8, data.astype(np.float64) * scale_inv


def affine(n, norm, seed=0):
    """Returns the vectors gamma and beta of a norm."""
    if norm not in ("layer", "rms"):
        return NO_VECTORS
    gamma, beta = 0.3 * np.random.default_rng(seed).standard_normal((2, n))
    gamma, beta = (jnp.asarray(x, jnp.float32) for x in (1 + gamma, beta))
    return NormVectors(gamma=gamma, beta=beta)


def activate(name, u):
    """Returns the activations of float64 values, and their slopes."""
    t, cubic = np.tanh(u / 2), GELU_SCALE * (u + 0.044715 * u**3)
    inner, slope = np.tanh(cubic), GELU_SCALE * (1 + 3 * 0.044715 * u**2)
    hard_slope = np.select([u > 3, u < -3], [1.0, 0.0], u / 3 + 0.5)
    gelu_slope = (1 + inner) / 2 + u * (1 - inner**2) * slope / 2
    return {
        "none": (u, np.ones_like(u)),
        "relu": (np.maximum(u, 0), np.where(u > 0, 1.0, 0.0)),
        "swish": (u * (0.5 + 0.5 * t), (1 + t) / 2 + u * (1 - t**2) / 4),
        "hard_swish": (u * np.clip(u / 6 + 0.5, 0, 1), hard_slope),
        "gelu": (u * (0.5 + 0.5 * inner), gelu_slope),
    }[name]


def forward(z, vectors, epilogue):
    """Returns y, xhat and rstd in float64."""
    z, bias, gamma, beta = (
        default if x is None else np.asarray(x).astype(np.float64)
        for x, default in zip((z, *vectors), (None, 0.0, 1.0, 0.0), strict=True)
    )
    xhat, rstd = normalize(z + bias, epilogue.norm, epilogue.epsilon)
    return activate(epilogue.activation, gamma * xhat + beta)[0], xhat, rstd


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


def backward(dy, residuals, vectors, epilogue):
    """Returns dz, dgamma and dbeta in float64, and the sums of their magnitudes."""
    (xhat, rstd), norm = residuals, epilogue.norm
    scale = xhat_scale_inv(norm, xhat.shape[1]) if xhat.dtype == E4M3 else 1.0
    gamma = 1.0 if vectors.gamma is None else vectors.gamma
    beta = 0.0 if vectors.beta is None else vectors.beta
    dy, x, gamma, beta = (
        np.asarray(v).astype(np.float64) for v in (dy, xhat, gamma, beta)
    )
    x = scale * x
    m, n = dy.shape
    du = dy * activate(epilogue.activation, gamma * x + beta)[1]
    dz = du * gamma
    if norm != "none":
        columns = 256 if norm == "block" else n
        g, blocks = (v.reshape(m, -1, columns) for v in (dz, x))
        r = np.asarray(rstd, np.float64).reshape(-1, m).T[:, :, None]
        dz = g - blocks * (g * blocks).mean(2, keepdims=True)
        if norm == "layer":
            dz = dz - g.mean(2, keepdims=True)
        dz = (r * dz).reshape(m, n)
    terms = du * x, du
    return dz, *(v.sum(0) for v in terms), *(np.abs(v).sum(0) for v in terms)


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
