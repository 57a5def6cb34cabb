"""The backward kernel against a float32 reference, itself against autodiff."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax import fp8
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import XHAT_SCALE_INV, Gradients
from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm_backward import Settings, dense_norm_backward, why_not

BF16 = jnp.bfloat16
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
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def normalize(z, norm, epsilon=1e-6):
    """Returns the normalized rows and their reciprocal deviations."""
    if norm == "none":
        return z, None
    if norm == "layer":
        z = z - jnp.mean(z, axis=1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(z**2, axis=1) + epsilon)
    return z * rstd[:, None], rstd


def reference(dy, xhat, rstd, w, *, gamma, beta, norm, activation):
    """Returns the gradients in float32, from the rows as they were stored."""

    def activate(xhat, gamma, beta):
        u = xhat if gamma is None else xhat * gamma[None] + beta[None]
        return ACTIVATIONS[activation](u)

    vjp = jax.vjp(activate, xhat, gamma, beta)[1]
    dz, dgamma, dbeta = vjp(dy)
    if norm != "none":
        mean = functools.partial(jnp.mean, axis=1, keepdims=True)
        centre = mean(dz) if norm == "layer" else 0.0
        dz = rstd[:, None] * (dz - centre - xhat * mean(dz * xhat))
    if isinstance(w, Fp8Array):
        amax = jnp.max(jnp.abs(dz), axis=1, keepdims=True)
        rounded = fp8.cast(dz, jnp.maximum(amax, 1e-30) / 448.0, E4M3).dequantize()
        return Gradients(rounded @ w.dequantize().T, dz, dgamma, dbeta)
    wide = w.astype(jnp.float32)
    rounded = dz.astype(BF16).astype(jnp.float32)
    return Gradients(rounded @ wide.T, dz, dgamma, dbeta)


def make(m, k, n, norm, xhat_dtype, w_dtype, scales="tensor"):
    """Returns the operands of the kernel, and z."""
    rng = np.random.default_rng(m + k + n)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    # Rows of very different size: one scale for all would lose the small ones.
    dy = (normal(m, n) * jnp.logspace(0, -6, m)[:, None]).astype(BF16)
    z = 2.0 * normal(m, n) + 0.3
    w = normal(k, n)
    if w_dtype == E4M3:
        w = fp8.quantize(w, E4M3, axes=(1,) if scales == "row" else None)
    else:
        w = w.astype(BF16)
    xhat, rstd = normalize(z, norm)
    if xhat_dtype == E4M3:
        xhat = fp8.cast(xhat, jnp.float32(XHAT_SCALE_INV), E4M3).data
    else:
        xhat = xhat.astype(BF16)
    gamma, beta = None, None
    if norm in ("layer", "rms"):
        gamma, beta = 1.0 + 0.2 * normal(n), 0.3 * normal(n)
    return (dy, xhat, rstd, w), dict(gamma=gamma, beta=beta), z


def wide(xhat):
    factor = XHAT_SCALE_INV if xhat.dtype == E4M3 else 1.0
    return xhat.astype(jnp.float32) * factor


def worst_row(out, expected):
    """Returns the largest relative error of a row."""
    out = np.asarray(out, np.float32).reshape(-1, out.shape[-1])
    expected = np.asarray(expected, np.float32).reshape(-1, expected.shape[-1])
    error = np.linalg.norm(out - expected, axis=1)
    return np.max(error / (np.linalg.norm(expected, axis=1) + 1e-30))


def check(m, k, n, norm, activation, xhat_dtype, w_dtype, scales="tensor", **settings):
    operands, parameters, _ = make(m, k, n, norm, xhat_dtype, w_dtype, scales)
    parameters |= dict(norm=norm, activation=activation)
    out = dense_norm_backward(
        *operands,
        **parameters,
        settings=Settings(**settings) if settings else None,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    races = interpret_pallas_call.get_races()
    assert not races.races_found
    dy, xhat, rstd, w = operands
    expected = reference(dy.astype(jnp.float32), wide(xhat), rstd, w, **parameters)
    for name, got, want in zip(out._fields, out, expected, strict=True):
        if want is None:
            assert got is None
            continue
        assert got.shape == want.shape, name
        # A value that was not written is not finite in the interpreter.
        assert np.all(np.isfinite(np.asarray(got, np.float32))), name
        # bfloat16's rounding: of dz, of dx, of what the column sums add up. An FP8
        # value next to a tie may round to the other side; for the largest value of the
        # unluckiest row that is 2 or 3 % of the row.
        limit = 0.006
        if name == "dx" and w_dtype == E4M3:
            limit = 0.045 if settings != dict(half=False) else 0.012
        assert worst_row(got, want) < limit, (name, worst_row(got, want))


# Every norm with both dtypes of xhat (a raw z is bfloat16) and of w.
@pytest.mark.parametrize(
    ("norm", "activation", "xhat_dtype", "w_dtype", "k", "n"),
    [
        ("layer", "swish", E4M3, E4M3, 64, 128),
        ("layer", "none", BF16, E4M3, 128, 64),
        ("layer", "relu", E4M3, BF16, 64, 64),
        ("layer", "gelu", BF16, BF16, 64, 64),
        ("rms", "gelu", E4M3, E4M3, 64, 64),
        ("rms", "hard_swish", BF16, E4M3, 64, 64),
        ("rms", "swish", BF16, BF16, 64, 128),
        ("block", "gelu", E4M3, E4M3, 64, 64),
        ("block", "swish", BF16, BF16, 64, 64),
        ("none", "relu", BF16, E4M3, 64, 64),
        ("none", "gelu", BF16, BF16, 128, 64),
    ],
)
def test_matches_the_reference(norm, activation, xhat_dtype, w_dtype, k, n):
    check(64 * 3, k, n, norm, activation, xhat_dtype, w_dtype)


def test_matches_at_the_widest():
    check(64 * 3, 256, 256, "layer", "swish", E4M3, E4M3, scales="row")


def test_slots_and_slabs_change_nothing():
    check(64 * 5, 128, 64, "rms", "swish", E4M3, E4M3, slots=3, slabs=2)


def test_fp8_values_are_the_exact_ones_with_a_slope_in_float32():
    check(64 * 3, 64, 64, "layer", "swish", E4M3, E4M3, half=False)


def test_packed_registers_and_narrow_pieces_change_nothing():
    settings = dict(packed=64, chunk=64, piece=32)
    check(64 * 3, 64, 128, "layer", "swish", E4M3, E4M3, **settings)


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_reference_is_the_gradient(norm):
    (dy, _, rstd, w), parameters, z = make(64, 64, 128, norm, BF16, BF16)
    dy = dy.astype(jnp.float32)

    def site(z, gamma, beta):
        u = normalize(z, norm)[0]
        u = u if gamma is None else u * gamma[None] + beta[None]
        return jnp.sum(ACTIVATIONS["swish"](u) * dy)

    want = jax.grad(site, argnums=(0, 1, 2))(z, *parameters.values())
    xhat = normalize(z, norm)[0]
    got = reference(dy, xhat, rstd, w, **parameters, norm=norm, activation="swish")
    for a, b in zip(got[1:], want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert worst_row(a, b) < 1e-4


@pytest.mark.parametrize("sizes", [(65, 64, 64), (0, 64, 64), (64, 96, 64)])
def test_says_why_a_shape_is_not_served(sizes):
    kwargs = dict(xhat_dtype=E4M3, w_dtype=E4M3, norm="layer", activation="swish")
    assert why_not(64, 64, 64, **kwargs) is None
    assert "multiple of 64" in str(why_not(*sizes, **kwargs))


@pytest.mark.parametrize("w_dtype", [E4M3, BF16])
@pytest.mark.parametrize("xhat_dtype", [E4M3, BF16])
@pytest.mark.parametrize("sizes", [(128, 128), (256, 256), (512, 256)])
def test_defaults_lower(sizes, xhat_dtype, w_dtype, monkeypatch):
    monkeypatch.setattr(tiles, "SMS", 132)
    k, n = sizes
    m = 64 * 200
    site = dict(norm="layer", activation="swish")
    reason = why_not(m, k, n, xhat_dtype=xhat_dtype, w_dtype=w_dtype, **site)
    if reason is not None:
        assert "shared memory" in reason
        return
    (*operands, w), parameters, _ = make(m, k, n, "layer", xhat_dtype, w_dtype)

    def f(dy, xhat, rstd):
        return dense_norm_backward(dy, xhat, rstd, w, **parameters, **site)

    lowered = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
