"""`norm_backward` against numpy in float64, interpreted and on a GPU."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.fp8 import E4M3, E5M2, fp8_max
from loka_jax.normed import Epilogue, NormResiduals, NormVectors, xhat_scale_inv
from loka_jax.pallas.norm_backward import (
    default_config,
    norm_backward,
    why_not,
)
from loka_jax.pallas.rows import TuningConfig
from tests.support import pallas as support
from tests.support.pallas import interpret

pytestmark = pytest.mark.slow

__all__ = ["interpret"]

BF16 = jnp.bfloat16
M = 64
# One tile for each of two SMs; in other tests the ring buffer wraps around.
SMALL = TuningConfig(rows=8, pipeline_stages=1, warpgroups=1)
LANES = TuningConfig(lanes=128, warpgroups=2)
LAYER_SWISH = Epilogue("layer", "swish")

run = support.launcher(norm_backward)


def _operands(n, norm, xhat_dtype, *, m=M):
    """Returns dy, the residuals and the vectors."""
    rng = np.random.default_rng(0)
    # Rows of very different size: one scale for all would lose the small ones.
    dy = np.logspace(0, -6, m)[:, None] * rng.standard_normal((m, n))
    z = 2 * rng.standard_normal((m, n)) + 0.3
    xhat, rstd = support.normalize(z, norm, 1e-6)
    rstd = None if rstd is None else jnp.asarray(rstd, jnp.float32)
    scale = 1 / xhat_scale_inv(norm, n) if xhat_dtype == E4M3 else 1.0
    xhat = jnp.asarray(scale * xhat, jnp.float32).astype(xhat_dtype)
    dy = jnp.asarray(dy, BF16)
    return dy, NormResiduals(xhat, rstd), support.affine(n, norm)


def _slope(activation, u):
    """Returns the derivative of the activation."""
    t = np.tanh(u / 2)
    inner = support.GELU_SCALE * (u + 0.044715 * u**3)
    slope = support.GELU_SCALE * (1 + 3 * 0.044715 * u**2)
    return {
        "none": lambda: np.ones_like(u),
        "relu": lambda: np.where(u > 0, 1.0, 0.0),
        "swish": lambda: (1 + t) / 2 + u * (1 - t**2) / 4,
        "hard_swish": lambda: np.select([u > 3, u < -3], [1.0, 0.0], u / 3 + 0.5),
        "gelu": lambda: (
            (1 + np.tanh(inner)) / 2 + u * (1 - np.tanh(inner) ** 2) * slope / 2
        ),
    }[activation]()


def _reference(dy, residuals, vectors, epilogue):
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
    du = dy * _slope(epilogue.activation, gamma * x + beta)
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


# The GPU's tanh is accurate to 5e-4 relative to 1, and slopes multiply it by u.
def _slope_error():
    return 2e-3 if jax.default_backend() == "gpu" else 1e-5


def _check(run, n, epilogue, xhat_dtype, config, *, dz_fp8=E4M3, m=M):
    operands = _operands(n, epilogue.norm, xhat_dtype, m=m)
    out = run(*operands, epilogue=epilogue, dz_fp8=dz_fp8, config=config)
    dz, *sums = _reference(*operands, epilogue)
    error = _slope_error() * np.abs(dz).max(1, keepdims=True)
    support.assert_bfloat16(out.dz, dz, error=error)
    if dz_fp8 is not None:
        support.assert_e4m3_rows(out.dz_fp8, dz, error=error)
    else:
        assert out.dz_fp8 is None
    if operands[2].gamma is None:
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
        support.slow("layer", "none", E4M3, False),
        ("layer", "swish", BF16, True),
        ("layer", "gelu", E4M3, True),
        support.slow("rms", "relu", E4M3, False),
        ("rms", "hard_swish", BF16, True),
        support.slow("block", "none", BF16, True),
        ("block", "swish", E4M3, False),
        ("block", "hard_swish", E4M3, True),
    ],
)
def test_gradients_are_the_rounded_reference(
    run, norm, activation, xhat_dtype, quantize
):
    dz_fp8 = E4M3 if quantize else None
    _check(run, 256, Epilogue(norm, activation), xhat_dtype, SMALL, dz_fp8=dz_fp8)


@pytest.mark.parametrize(
    "n, norm, config",
    [
        (128, "layer", None),
        # The ring buffer wraps around.
        (256, "rms", TuningConfig(rows=1, pipeline_stages=3, warpgroups=2)),
        # Some warpgroups have no tile.
        (256, "layer", TuningConfig(rows=8, pipeline_stages=2, warpgroups=3)),
        (512, "block", TuningConfig(rows=2, pipeline_stages=2, warpgroups=3)),
        (640, "rms", TuningConfig(32, 2, 2, 2, keep_vectors=False)),
    ],
)
def test_widths_and_configs(run, n, norm, config):
    _check(run, n, Epilogue(norm, "swish"), E4M3, config)


@pytest.mark.parametrize(
    "n, norm, xhat_dtype, keep_vectors",
    [
        (512, "rms", BF16, False),
        support.slow(1024, "layer", E4M3, True),
    ],
)
def test_rows_over_all_warps(run, n, norm, xhat_dtype, keep_vectors):
    config = TuningConfig(128, 1, 2, 2, keep_vectors)
    _check(run, n, Epilogue(norm, "hard_swish"), xhat_dtype, config)


# Every norm; the repeated rows are in the first, a middle or the last turn of a
# warpgroup.
@pytest.mark.parametrize(
    "m, n, norm, config",
    [
        (65, 256, "layer", SMALL),
        (100, 512, "block", TuningConfig(rows=2, pipeline_stages=2, warpgroups=2)),
        (130, 256, "rms", TuningConfig(rows=1, pipeline_stages=3, warpgroups=2)),
        (200, 128, "none", None),
        support.slow(1000, 128, "layer", TuningConfig(rows=4, warpgroups=3)),
        support.slow(65, 512, "rms", LANES),
    ],
)
def test_rows_beyond_the_last_whole_tile(run, m, n, norm, config):
    xhat_dtype = BF16 if norm == "none" else E4M3
    _check(run, n, Epilogue(norm, "swish"), xhat_dtype, config, m=m)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5000, 49_999])
@pytest.mark.parametrize(
    "n, norm", [(256, "layer"), (512, "rms"), (512, "block"), (1024, "layer")]
)
def test_any_number_of_rows_on_the_device(m, n, norm):
    _check(norm_backward, n, Epilogue(norm, "swish"), E4M3, None, m=m)


@pytest.mark.parametrize("present", [(), ("gamma",), ("beta",)])
def test_missing_vectors(run, present):
    dy, residuals, vectors = _operands(256, "layer", BF16)
    vectors = NormVectors(**{name: getattr(vectors, name) for name in present})
    operands = dy, residuals, vectors
    out = run(*operands, epilogue=LAYER_SWISH, config=SMALL)
    dz, dgamma, dbeta, *_ = _reference(*operands, LAYER_SWISH)
    error = _slope_error() * np.abs(dz).max(1, keepdims=True)
    support.assert_bfloat16(out.dz, dz, error=error)
    for name, got, exact in (
        ("gamma", out.dgamma, dgamma),
        ("beta", out.dbeta, dbeta),
    ):
        if name in present:
            np.testing.assert_allclose(got, exact, atol=1e-2)
        else:
            assert got is None


@pytest.mark.parametrize("config", [SMALL, support.slow(LANES)])
def test_rows_of_zeros_and_rows_with_nan(run, config):
    dy, residuals, _ = _operands(512, "layer", BF16)
    dy = dy.at[3].set(0).at[5, 7].set(jnp.nan).at[6, 8].set(jnp.inf)
    out = run(dy, residuals, epilogue=LAYER_SWISH, dz_fp8=E4M3, config=config)
    support.assert_faults_stay_in_their_rows(out.dz_fp8, zeros=3, faulty=[5, 6])


@pytest.mark.parametrize("n, config", [(256, SMALL), support.slow(512, LANES)])
def test_a_scale_passed_in(run, n, config):
    operands = _operands(n, "layer", E4M3)
    dz, *_ = _reference(*operands, LAYER_SWISH)
    # Too small by half: the largest values saturate.
    scale_inv = jnp.float32(np.abs(dz).max() / fp8_max(E5M2) / 2)
    scaling = dict(dz_fp8=E5M2, dz_scale_inv=scale_inv)
    out = run(*operands, epilogue=LAYER_SWISH, **scaling, config=config)
    error = _slope_error() * np.abs(dz).max(1, keepdims=True)
    support.assert_fp8(out.dz_fp8.data, scale_inv, dz, error=error)
    assert out.dz_fp8.scale_inv is scale_inv
    np.testing.assert_allclose(
        jnp.max(out.dz_amax), np.abs(dz).max(), rtol=_slope_error()
    )


@pytest.mark.parametrize("n, config", [(256, SMALL), (128, None)])
def test_the_bias_has_a_gradient_without_a_norm(run, n, config):
    dy, residuals, _ = _operands(n, "none", BF16)
    epilogue, vectors = Epilogue("none", "swish"), NormVectors(bias=jnp.ones(n))
    out = run(dy, residuals, vectors, epilogue=epilogue, config=config)
    _, _, dbias, _, size = _reference(dy, residuals, vectors, epilogue)
    chex.assert_shape(out.dbias, (n,))
    assert np.all(np.abs(out.dbias - dbias) <= _slope_error() * size)
    assert out.dgamma is None and out.dbeta is None


@pytest.mark.parametrize("m", [M, 65, 100, 130, support.slow(1000)])
def test_every_row_is_summed_once(run, m):
    _check_sums(run, m, TuningConfig(rows=2, pipeline_stages=1, warpgroups=2))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [5000, 49_999])
def test_every_row_is_summed_once_on_the_device(m):
    _check_sums(norm_backward, m, None)


def _check_sums(run, m, config):
    """Checks sums of integers, which are exact: a row counted twice shows."""
    n, values = 256, 1 + jnp.arange(m, dtype=jnp.float32) % 251
    dy = jnp.broadcast_to(values[:, None], (m, n)).astype(BF16)
    out = run(
        dy,
        NormResiduals(jnp.ones((m, n), BF16), jnp.ones(m)),
        NormVectors(gamma=jnp.ones(n), beta=jnp.zeros(n)),
        epilogue=Epilogue("rms"),
        config=config,
    )
    np.testing.assert_array_equal(out.dbeta, jnp.sum(values))
    np.testing.assert_array_equal(out.dgamma, jnp.sum(values))


def test_every_row_of_a_bias_is_summed_once(run):
    m, n = 130, 128
    dy = jnp.broadcast_to(1 + jnp.arange(m)[:, None], (m, n)).astype(BF16)
    residuals, vectors = NormResiduals(dy, None), NormVectors(bias=jnp.zeros(n))
    config = TuningConfig(rows=4, pipeline_stages=2, warpgroups=2)
    out = run(dy, residuals, vectors, epilogue=Epilogue("none"), config=config)
    np.testing.assert_array_equal(out.dbias, m * (m + 1) / 2)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [512, 1024])
def test_launches_repeat_bit_by_bit(n):
    operands = _operands(n, "layer", BF16, m=8192)
    f = functools.partial(norm_backward, epilogue=LAYER_SWISH, dz_fp8=E4M3)
    support.assert_launches_repeat(f, *operands)


def _lowers(n, norm, xhat_dtype, config, *, m=32768):
    shape = jax.ShapeDtypeStruct
    rstd = shape((n // 256, m) if norm == "block" else (m,), jnp.float32)
    static = dict(epilogue=Epilogue(norm, "swish"), dz_fp8=E4M3, config=config)
    residuals = NormResiduals(shape((m, n), xhat_dtype), rstd)
    f = functools.partial(norm_backward, **static)
    return support.lowers(f, shape((m, n), BF16), residuals, support.affine(n, norm))


SLOW_SHAPES = [(256, "rms"), (640, "rms"), (4096, "rms")]


@pytest.mark.parametrize(
    "n, norm",
    [(512, "layer"), (512, "block"), (1024, "layer")]
    + [support.slow(*shape) for shape in SLOW_SHAPES],
)
def test_default_configs_lower_for_cuda(n, norm):
    assert _lowers(n, norm, E4M3, None)


@pytest.mark.parametrize("n, norm", [(256, "layer"), support.slow(512, "block")])
def test_any_number_of_rows_lowers_for_cuda(n, norm):
    assert _lowers(n, norm, E4M3, None, m=49_999)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [TuningConfig(32, 1, 5, 4), TuningConfig(32, 2, 3, 2, False), TuningConfig(128)],
)
def test_other_configs_lower_for_cuda(config):
    assert _lowers(512, "layer", BF16, config)


@pytest.mark.parametrize(
    "m, n, norm, xhat_dtype, reason",
    [
        (63, 512, "layer", BF16, "m=63 rows are fewer than 64"),
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
        residuals = NormResiduals(xhat, jnp.ones(m))
        norm_backward(dy, residuals, epilogue=Epilogue(norm))


def test_refused_configs_have_a_reason():
    refuse = functools.partial(why_not, 64, norm="layer", xhat_dtype=BF16)
    assert "shared memory" in refuse(1024, config=TuningConfig(pipeline_stages=5))
    assert "rows of a tile" in refuse(128, config=TuningConfig(rows=17))
    assert "multiple of 512" in refuse(640, config=TuningConfig(lanes=128))
    assert "single rows" in refuse(512, config=TuningConfig(rows=2, lanes=128))
    assert "sums of columns" in refuse(256, config=TuningConfig(lanes=8))


def test_default_configs_fit_every_served_shape():
    for norm in support.NORMS:
        for xhat_dtype in (BF16, E4M3):
            served = functools.partial(why_not, 64, norm=norm, xhat_dtype=xhat_dtype)
            for n in range(128, 4097, 128):
                if served(n) is None:
                    config = default_config(n, norm=norm)
                    assert served(n, config=config) is None, (n, config)
