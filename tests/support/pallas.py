"""Launches, references and checks of the Pallas kernels' tests.

The interpreter's race detector has no public name, nor have its parts that are replaced
here. References are numpy in float64: each element must be one rounding away from them,
besides an error the caller names.
"""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import (
    gpu_callbacks,
    interpret_pallas_call,
    shared_memory,
)
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import (
    GPURaceDetectionState as RaceDetectionState,
)
from jax._src.state.primitives import swap_p
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.fp8 import E4M3
from loka_jax.normed import NO_VECTORS, XHAT_SCALE_INV, NormVectors, xhat_scale_inv
from loka_jax.pallas import tiles
from tests.support import oracle

NORMS = ("none", "layer", "rms", "block")
_LAUNCHES = []  # of a test, their races
# n, d, k, m of Wukong S, M and L.
WUKONG = {"S": (40, 64, 24, 40), "M": (64, 128, 32, 64), "L": (96, 160, 48, 96)}


@pytest.fixture
def interpret(monkeypatch):
    """Yields the interpreter's parameters; two SMs make each CTA compute more tiles.

    It knows no stores to accumulators, which are memory to it, and takes the numbers of
    their memory again in the next CTA, for which the race detector takes them to race.
    """
    monkeypatch.setattr(tiles, "SMS", 2)
    monkeypatch.setattr(primitives, "wgmma_accumulator_store", _stored)
    numbers = itertools.count(-100, -1)
    of_next = lambda *_: next(numbers)  # noqa: E731
    memory = shared_memory.GPUSharedMemory
    monkeypatch.setattr(memory, "get_next_wgmma_accumulator_id", of_next)
    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", _races_of_launch)
    _LAUNCHES.clear()
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    yield plgpu.InterpretGPUParams(detect_races=True)
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def _stored(accumulator, value):
    swap_p.bind(accumulator, value, tree=jax.tree.structure(()))


def _races_of_launch(**how):
    _LAUNCHES.append(RaceDetectionState(**how))
    return _LAUNCHES[-1]


def assert_no_races():
    """Asserts that the race detector found no race in any launch of a test."""
    assert not any(races.races_found for races in _LAUNCHES)


def interpreted(kernel, interpret):
    """Returns `kernel` as interpreted, with a check for races."""

    def run(*args, **kwargs):
        out = jax.block_until_ready(kernel(*args, **kwargs, interpret=interpret))
        assert _LAUNCHES
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
    """Returns the shapes of arrays by name."""
    fields = fields if isinstance(fields, dict) else fields._asdict()
    return {name: item.shape for name, item in fields.items() if item is not None}


def affine(n, norm, seed=0):
    """Returns the vectors gamma and beta of a norm."""
    if norm not in ("layer", "rms"):
        return NO_VECTORS
    gamma, beta = 0.3 * np.random.default_rng(seed).standard_normal((2, n))
    gamma, beta = (jnp.asarray(x, jnp.float32) for x in (1 + gamma, beta))
    return NormVectors(gamma=gamma, beta=beta)


def forward(z, vectors, epilogue):
    """Returns y, xhat and rstd in float64."""
    z, vectors = oracle.in_float64((z, vectors))
    z = z if vectors.bias is None else z + vectors.bias
    xhat, rate = oracle.normalized(z, epilogue.norm, epsilon=epilogue.epsilon)
    y, _ = oracle.activate(epilogue.activation, oracle.affine(xhat, vectors))
    return y, xhat, rstd_of(rate, epilogue.norm)


def rstd_of(rate, norm):
    """Returns a rate of each row, or of each block [blocks, rows]; None of no norm."""
    return {"none": None, "block": rate[:, ::256].T.squeeze()}.get(norm, rate[:, 0])


def backward(dy, residuals, vectors, epilogue):
    """Returns dz, dgamma and dbeta in float64, and the sums of their magnitudes."""
    norm, is_fp8 = epilogue.norm, residuals.xhat.dtype == E4M3
    dy, (x, rstd), vectors = oracle.in_float64((dy, residuals, vectors))
    # At 3, a code of E4M3, the kernels' hard_swish has the slope on the side of 0.
    x = x * (xhat_scale_inv(norm, x.shape[1]) if is_fp8 else 1.0) * (1 - 1e-9)
    columns = 256 if norm == "block" else x.shape[1]
    rate = None if norm == "none" else rstd.reshape(-1, len(x)).T.repeat(columns, 1)
    args = dy, x, rate, vectors, norm, epilogue.activation
    dz, *terms = oracle.product_gradient(*args)
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


def assert_outputs(
    out, want, exact, *, error, xhat_error, y_scale_inv, rtol, amax_rtol=0.0
):
    """Asserts every output that is wanted, within an error, and that there is no other.

    The error is of each row or of all; the others are relative.
    """
    y, xhat, rstd = exact
    names = [field.name for field in dataclasses.fields(want)]
    wanted = [bool(getattr(want, name)) for name in names]
    assert wanted == [getattr(out, name) is not None for name in names]
    if want.y:
        assert_bfloat16(out.y, y, error=error)
    if want.y_fp8 == "rowwise":
        assert_e4m3_rows(out.y_fp8, y, error=error)
    elif want.y_fp8 == "tensorwise":
        assert_fp8(out.y_fp8.data, y_scale_inv, y, error=error)
    if want.y_amax:
        largest = np.asarray(out.y_amax, np.float64).reshape(-1, len(y)).max(0)
        error_of_amax = np.ravel(error) + amax_rtol * np.abs(y).max(1)
        assert np.all(np.abs(largest - np.abs(y).max(1)) <= error_of_amax)
    if want.xhat == E4M3:
        assert_fp8(out.xhat, XHAT_SCALE_INV, xhat, error=xhat_error)
    elif want.xhat is not None:
        assert_bfloat16(out.xhat, xhat, error=xhat_error)
    if want.rstd:
        np.testing.assert_allclose(out.rstd, rstd, rtol=rtol)


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
