"""What the tests of the kernels that work by rows share: launches, references, checks.

References are numpy in float64. "Is the kernel right?" is asked of each element: it is
one rounding away from the exact value, besides an error that the caller names.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.pallas import tiles

NORMS = ("none", "layer", "rms", "block")


def launcher(kernel):
    """Returns a fixture that runs `kernel`, interpreted and on a GPU.

    In the interpreter on two SMs, so that each walks over tiles, and with the race
    detector.
    """
    params = ["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)]

    @pytest.fixture(params=params)
    def run(request, monkeypatch):
        if request.param == "on_gpu":
            yield kernel
            return
        monkeypatch.setattr(tiles, "SMS", 2)
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        interpret = plgpu.InterpretGPUParams(detect_races=True)

        def interpreted(*args, **kwargs):
            out = jax.block_until_ready(kernel(*args, **kwargs, interpret=interpret))
            assert not interpret_pallas_call.get_races().races_found
            return out

        yield interpreted
        interpret_pallas_call.reset_gpu_interpret_mode_state()

    return run


def affine(n, norm, rng):
    """Returns the gamma and beta that a norm has, by name."""
    if norm not in ("layer", "rms"):
        return {}
    gamma, beta = 1 + 0.3 * rng.standard_normal(n), 0.3 * rng.standard_normal(n)
    parameters = dict(gamma=gamma, beta=beta)
    return {k: jnp.asarray(v, jnp.float32) for k, v in parameters.items()}


def normalize(z, norm, epsilon):
    """Returns xhat and the reciprocal deviations of z, None without a norm."""
    if norm == "none":
        return z, None
    m, n = z.shape
    blocks = z.reshape(m, -1, 256 if norm == "block" else n)
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


def lowers(f, *args, **kwargs) -> bool:
    """Lowers f for CUDA, which needs no GPU; returns whether it holds a kernel."""
    traced = jax.jit(f).trace(*args, **kwargs)
    return "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def assert_launches_repeat(f, *args, **kwargs):
    """Asserts that a thousand launches on a GPU agree bit by bit with the first."""
    f = jax.jit(f)
    first = f(*args, **kwargs)

    def bits(x):
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    @jax.jit
    def differing(out):
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(out), strict=True)
        return sum(jnp.sum(bits(x) != bits(y)) for x, y in pairs)

    total = jnp.int32(0)
    for _ in range(1000):
        total += differing(f(*args, **kwargs))
    assert total == 0
