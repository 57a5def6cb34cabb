"""The backward kernel against autodiff of what it differentiates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax import fp8
from loka_jax.fp8 import E4M3
from loka_jax.normed import NORM_BLOCK, XHAT_SCALE_INV
from loka_jax.pallas import dense_norm_backward as module
from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm_backward import Settings, dense_norm_backward

BF16 = jnp.bfloat16
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
ACTIVATIONS = {
    "none": lambda u: u,
    "relu": lambda u: jnp.maximum(u, 0.0),
    "swish": jax.nn.swish,
    "hard_swish": jax.nn.hard_swish,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
}


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """Lets every CTA take several tiles, and leaves no interpreter state behind."""
    monkeypatch.setattr(tiles, "SMS", 2)
    yield
    plgpu_interpret().reset_gpu_interpret_mode_state()


def plgpu_interpret():
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return interpret_pallas_call


def normalize(z, norm, epsilon=1e-6):
    """Returns the normalized rows and the reciprocal deviations."""
    if norm == "none":
        return z, None
    if norm == "block":
        side = min(z.shape[1], NORM_BLOCK)
        blocks = z.reshape(z.shape[0], -1, side)
        rstd = jax.lax.rsqrt(jnp.mean(blocks**2, axis=2) + epsilon)
        xhat = (blocks * rstd[:, :, None]).reshape(z.shape)
        return xhat, rstd[:, 0] if rstd.shape[1] == 1 else rstd
    if norm == "layer":
        z = z - jnp.mean(z, axis=1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(z**2, axis=1) + epsilon)
    return z * rstd[:, None], rstd


def make(m, k, n, norm, activation, xhat_dtype, w_dtype):
    """Returns operands, and the gradients by autodiff of what they stand for."""
    rng = np.random.default_rng(m + k + n)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    # Rows of very different size: one scale for all would lose the small ones.
    dy = (normal(m, n) * jnp.logspace(0, -6, m)[:, None]).astype(BF16)
    z = 2.0 * normal(m, n) + 0.3
    gamma, beta = None, None
    if norm in ("layer", "rms"):
        gamma, beta = 1.0 + 0.2 * normal(n), 0.3 * normal(n)
    w = normal(k, n)
    w = fp8.quantize(w, E4M3, axes=(1,)) if w_dtype == E4M3 else w.astype(BF16)
    xhat, rstd = normalize(z, norm)
    stored = xhat.astype(BF16)
    if norm != "none" and xhat_dtype == E4M3:
        stored = fp8.cast(xhat, jnp.float32(XHAT_SCALE_INV), E4M3).data

    def loss(z, gamma, beta):
        # Through the stored rows: what is compared is the kernel, not their rounding.
        exact = normalize(z, norm)[0]
        factor = XHAT_SCALE_INV if stored.dtype == E4M3 else 1.0
        rounded = stored.astype(jnp.float32) * factor
        u = exact + jax.lax.stop_gradient(rounded - exact)
        if gamma is not None:
            u = u * gamma[None] + beta[None]
        return jnp.sum(ACTIVATIONS[activation](u) * dy.astype(jnp.float32))

    dz, dgamma, dbeta = jax.grad(loss, argnums=(0, 1, 2))(z, gamma, beta)
    wide = w.dequantize() if w_dtype == E4M3 else w.astype(jnp.float32)
    operands = (dy, stored, rstd, w)
    parameters = dict(gamma=gamma, beta=beta, norm=norm, activation=activation)
    return operands, parameters, (dz @ wide.T, dz, dgamma, dbeta)


def worst_row(out, expected):
    """Returns the largest relative error of a row."""
    out = np.asarray(out, np.float32).reshape(-1, out.shape[-1])
    expected = np.asarray(expected, np.float32).reshape(-1, expected.shape[-1])
    error = np.linalg.norm(out - expected, axis=1)
    return np.max(error / (np.linalg.norm(expected, axis=1) + 1e-30))


def check(m, k, n, norm, activation, xhat_dtype, w_dtype, settings=None):
    operands, parameters, expected = make(
        m, k, n, norm, activation, xhat_dtype, w_dtype
    )
    out = dense_norm_backward(
        *operands, **parameters, settings=settings, interpret=INTERPRET
    )
    for name, got, want in zip(out._fields, out, expected, strict=True):
        if want is None:
            assert got is None
            continue
        assert got.shape == want.shape, name
        assert np.all(np.isfinite(np.asarray(got, np.float32))), name
        print(name, worst_row(got, want))


if __name__ == "__main__":
    import sys, time

    tiles.SMS = 2
    for a in sys.argv[1:]:
        t = time.time()
        print(a)
        eval(a)
        print(round(time.time() - t, 2))
