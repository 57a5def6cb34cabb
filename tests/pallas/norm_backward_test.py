"""`norm_backward` against numpy in float64, interpreted and on a GPU."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3, E5M2, fp8_max
from loka_jax.normed import XHAT_SCALE_INV
from loka_jax.pallas.norm_backward import (
    default_settings,
    norm_backward,
    search_space,
    why_not,
)
from loka_jax.pallas.rows import Settings
from tests.pallas import support

BF16 = jnp.bfloat16
M = 64
# A tile for each of two SMs; other tests go round the ring.
SMALL = Settings(rows=8, stages=1, warpgroups=1)
LANES = Settings(lanes=128, warpgroups=2)

run = support.launcher(norm_backward)


def _operands(n, norm, xhat_dtype, *, m=M):
    """Returns dy, xhat, rstd and the parameters."""
    rng = np.random.default_rng(0)
    # Rows of very different size: one scale for all would lose the small ones.
    dy = np.logspace(0, -6, m)[:, None] * rng.standard_normal((m, n))
    z = 2 * rng.standard_normal((m, n)) + 0.3
    xhat, rstd = support.normalize(z, norm, 1e-6)
    rstd = None if rstd is None else jnp.asarray(rstd, jnp.float32)
    scale = 1 / XHAT_SCALE_INV if xhat_dtype == E4M3 else 1.0
    xhat = jnp.asarray(scale * xhat, jnp.float32).astype(xhat_dtype)
    return (jnp.asarray(dy, BF16), xhat, rstd), support.affine(n, norm, rng)


def _slope(activation, u):
    """Returns the derivative of the activation."""
    t = np.tanh(u / 2)
    inner = np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * u**2)
    return {
        "none": lambda: np.ones_like(u),
        "relu": lambda: np.where(u > 0, 1.0, 0.0),
        "swish": lambda: (1 + t) / 2 + u * (1 - t**2) / 4,
        "hard_swish": lambda: np.select([u > 3, u < -3], [1.0, 0.0], u / 3 + 0.5),
        "gelu": lambda: (
            (1 + np.tanh(inner)) / 2 + u * (1 - np.tanh(inner) ** 2) * slope / 2
        ),
    }[activation]()


def _reference(dy, xhat, rstd, *, gamma=1.0, beta=0.0, norm, activation):
    """Returns dz, dgamma and dbeta in float64, and the sums of what they sum up."""
    scale = XHAT_SCALE_INV if xhat.dtype == E4M3 else 1.0
    dy, x, gamma, beta = (
        np.asarray(v).astype(np.float64) for v in (dy, xhat, gamma, beta)
    )
    x = scale * x
    m, n = dy.shape
    du = dy * _slope(activation, gamma * x + beta)
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


# The GPU's tanh is right to 5e-4 relative to 1, and a slope takes it times u.
def _slope_error():
    return 2e-3 if jax.default_backend() == "gpu" else 1e-5


def _check(run, n, norm, activation, xhat_dtype, settings, *, dz_fp8=E4M3):
    operands, parameters = _operands(n, norm, xhat_dtype)
    names = dict(norm=norm, activation=activation)
    out = run(*operands, **parameters, **names, dz_fp8=dz_fp8, settings=settings)
    dz, *sums = _reference(*operands, **parameters, **names)
    error = _slope_error() * np.abs(dz).max(1, keepdims=True)
    support.assert_bfloat16(out.dz, dz, error=error)
    if dz_fp8 is not None:
        support.assert_e4m3_rows(out.dz_fp8, dz, error=error)
    else:
        assert out.dz_fp8 is None
    if not parameters:
        assert out.dgamma is None and out.dbeta is None
        return
    dgamma, dbeta, gamma_size, beta_size = sums
    for got, exact, size in (
        (out.dgamma, dgamma, gamma_size),
        (out.dbeta, dbeta, beta_size),
    ):
        chex.assert_shape(got, (n,))
        assert np.all(np.abs(got - exact) <= _slope_error() * size)


# Every norm and every activation with both dtypes of xhat; every activation with and
# without gamma and beta.
@pytest.mark.parametrize(
    "norm, activation, xhat_dtype, quantize",
    [
        ("none", "relu", BF16, True),
        ("none", "gelu", BF16, False),
        ("layer", "none", E4M3, False),
        ("layer", "swish", BF16, True),
        ("layer", "gelu", E4M3, True),
        ("rms", "relu", E4M3, False),
        ("rms", "hard_swish", BF16, True),
        ("block", "none", BF16, True),
        ("block", "swish", E4M3, False),
        ("block", "hard_swish", E4M3, True),
    ],
)
def test_gradients_are_the_rounded_reference(
    run, norm, activation, xhat_dtype, quantize
):
    _check(
        run, 256, norm, activation, xhat_dtype, SMALL, dz_fp8=E4M3 if quantize else None
    )


@pytest.mark.parametrize(
    "n, norm, settings",
    [
        (128, "layer", None),
        (256, "rms", Settings(rows=1, stages=3, warpgroups=2)),  # goes round the ring
        (256, "layer", Settings(rows=8, stages=2, warpgroups=3)),  # some have no tile
        (512, "block", Settings(rows=2, stages=2, warpgroups=3)),
        (640, "rms", Settings(rows=2, stages=2, warpgroups=2, resident=False)),
    ],
)
def test_widths_and_settings(run, n, norm, settings):
    _check(run, n, norm, "swish", E4M3, settings)


@pytest.mark.parametrize(
    "n, norm, xhat_dtype, resident",
    [(512, "rms", BF16, False), (1024, "layer", E4M3, True)],
)
def test_rows_over_all_warps(run, n, norm, xhat_dtype, resident):
    settings = Settings(lanes=128, stages=2, warpgroups=2, resident=resident)
    _check(run, n, norm, "hard_swish", xhat_dtype, settings)


@pytest.mark.parametrize("given", [(), ("gamma",), ("beta",)])
def test_missing_parameters(run, given):
    operands, parameters = _operands(256, "layer", BF16)
    parameters = {k: parameters[k] for k in given}
    names = dict(norm="layer", activation="swish")
    out = run(*operands, **parameters, **names, settings=SMALL)
    dz, dgamma, dbeta, *_ = _reference(*operands, **parameters, **names)
    error = _slope_error() * np.abs(dz).max(1, keepdims=True)
    support.assert_bfloat16(out.dz, dz, error=error)
    for name, got, exact in (
        ("gamma", out.dgamma, dgamma),
        ("beta", out.dbeta, dbeta),
    ):
        if name in given:
            np.testing.assert_allclose(got, exact, atol=1e-2)
        else:
            assert got is None


@pytest.mark.parametrize("settings", [SMALL, LANES])
def test_rows_of_zeros_and_rows_with_nan(run, settings):
    (dy, xhat, rstd), _ = _operands(512, "layer", BF16)
    dy = dy.at[3].set(0).at[5, 7].set(jnp.nan).at[6, 8].set(jnp.inf)
    names = dict(norm="layer", activation="swish")
    out = run(dy, xhat, rstd, **names, dz_fp8=E4M3, settings=settings)
    support.assert_faults_stay_in_their_rows(out.dz_fp8, zeros=3, faulty=[5, 6])


@pytest.mark.parametrize("n, settings", [(256, SMALL), (512, LANES)])
def test_a_scale_that_is_given(run, n, settings):
    operands, parameters = _operands(n, "layer", E4M3)
    names = dict(norm="layer", activation="swish")
    dz, *_ = _reference(*operands, **parameters, **names)
    # Too small by half: the largest values saturate.
    scale_inv = jnp.float32(np.abs(dz).max() / fp8_max(E5M2) / 2)
    names |= dict(dz_fp8=E5M2, dz_scale_inv=scale_inv, settings=settings)
    out = run(*operands, **parameters, **names)
    error = _slope_error() * np.abs(dz).max(1, keepdims=True)
    support.assert_fp8(out.dz_fp8.data, scale_inv, dz, error=error)
    assert out.dz_fp8.scale_inv is scale_inv
    np.testing.assert_allclose(
        jnp.max(out.dz_amax), np.abs(dz).max(), rtol=_slope_error()
    )


def test_every_row_is_summed_once(run):
    m, n = M, 256
    rows = jnp.arange(m, dtype=jnp.float32)[:, None]
    dy = jnp.broadcast_to(rows, (m, n)).astype(BF16)
    xhat = jnp.ones((m, n), BF16)
    parameters = dict(gamma=jnp.ones(n), beta=jnp.zeros(n))
    out = run(
        *(dy, xhat, jnp.ones(m)),
        **parameters,
        norm="rms",
        activation="none",
        settings=Settings(rows=2, stages=1, warpgroups=2),
    )
    np.testing.assert_array_equal(out.dbeta, m * (m - 1) / 2)
    np.testing.assert_array_equal(out.dgamma, m * (m - 1) / 2)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [512, 1024])
def test_launches_repeat_bit_by_bit(n):
    operands, parameters = _operands(n, "layer", BF16, m=8192)
    names = dict(norm="layer", activation="swish", dz_fp8=E4M3)
    f = functools.partial(norm_backward, **names)
    support.assert_launches_repeat(f, *operands, **parameters)


def _lowers(n, norm, xhat_dtype, settings):
    m = 32768
    shape = jax.ShapeDtypeStruct
    columns = shape((n,), jnp.float32)
    rstd = shape((n // 256, m) if norm == "block" else (m,), jnp.float32)
    parameters = dict(gamma=columns, beta=columns) if norm in ("layer", "rms") else {}
    names = dict(norm=norm, activation="swish", dz_fp8=E4M3, settings=settings)
    operands = shape((m, n), BF16), shape((m, n), xhat_dtype), rstd
    f = functools.partial(norm_backward, **names)
    return support.lowers(f, *operands, **parameters)


SHAPES = [(256, "rms"), (512, "layer"), (512, "block"), (640, "rms")]
SHAPES += [(1024, "layer"), (4096, "rms")]


@pytest.mark.parametrize("n, norm", SHAPES)
def test_default_settings_lower_for_cuda(n, norm):
    assert _lowers(n, norm, E4M3, None)


def test_other_settings_lower_for_cuda():
    space = search_space(32768, 512, norm="layer", xhat_dtype=BF16)
    for settings in space[1::12]:
        assert _lowers(512, "layer", BF16, settings)


@pytest.mark.parametrize(
    "m, n, norm, xhat_dtype, reason",
    [
        (100, 512, "layer", BF16, "m=100"),
        (0, 512, "layer", BF16, "m=0"),
        (64, 100, "layer", BF16, "n=100"),
        (64, 1152, "layer", BF16, "n=1152"),
        (64, 8192, "layer", BF16, "n=8192"),
        (64, 384, "block", BF16, "n=384"),
        (64, 4096, "block", BF16, "n=4096"),
        (64, 512, "none", E4M3, "xhat is in bfloat16"),
        (64, 512, "layer", jnp.float32, "xhat is float32"),
    ],
)
def test_refused_shapes_have_a_reason(m, n, norm, xhat_dtype, reason):
    assert reason in why_not(m, n, norm=norm, xhat_dtype=xhat_dtype)
    with pytest.raises(ValueError, match=reason):
        dy, xhat = jnp.zeros((m, n), BF16), jnp.zeros((m, n), xhat_dtype)
        names = dict(norm=norm, activation="none")
        norm_backward(dy, xhat, jnp.ones(m), **names)


def test_refused_settings_have_a_reason():
    refuse = functools.partial(why_not, 64, norm="layer", xhat_dtype=BF16)
    assert "shared memory" in refuse(1024, settings=Settings(stages=5))
    assert "rows of a tile" in refuse(256, settings=Settings(rows=3))
    assert "multiple of 512" in refuse(640, settings=Settings(lanes=128))
    assert "single rows" in refuse(512, settings=Settings(rows=2, lanes=128))
    assert "sums of columns" in refuse(256, settings=Settings(lanes=8))


def test_default_settings_serve_what_is_served():
    for norm in support.NORMS:
        for xhat_dtype in (BF16, E4M3):
            served = functools.partial(why_not, 64, norm=norm, xhat_dtype=xhat_dtype)
            for n in range(128, 4097, 128):
                if served(n) is None:
                    settings = default_settings(64, n, norm=norm, xhat_dtype=xhat_dtype)
                    assert served(n, settings=settings) is None, (n, settings)
