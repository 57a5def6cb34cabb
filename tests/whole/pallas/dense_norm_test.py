"""The fused forward kernel against numpy, in the interpreter with its race detector.

The reference takes the dequantized operands in float64: bfloat16 outputs must agree to
their rounding, FP8 outputs to theirs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import XHAT_SCALE_INV, Epilogue, Outputs
from loka_jax.pallas.dense_norm import dense_norm
from loka_jax.pallas.dense_norm_layout import (
    Problem,
    TuningConfig,
    best_config,
    search_space,
    why_not,
)
from loka_jax.site import SiteSpec
from tests.support import FLOOR_DB, normal, sqnr_db
from tests.support import pallas as support
from tests.support.pallas import interpret

__all__ = ["interpret"]

BF16 = jnp.bfloat16
ACTIVATIONS = ("none", "relu", "swish", "hard_swish", "gelu")
# bfloat16 rounds to 2**-9: 59 dB, less the error of a half-precision intermediate.
BF16_DB = 54.0


@pytest.fixture
def run(interpret):
    return support.interpreted(dense_norm, interpret)


def _operands(m, k, n, *, x_scale="rowwise", w_scale="tensorwise"):
    # Rows and columns of different sizes, so that a misplaced scale shows.
    x = normal(m, k, seed=1) * np.linspace(0.1, 3, m, dtype=np.float32)[:, None]
    w = normal(n, k, seed=2) * np.linspace(0.5, 2, n, dtype=np.float32)[:, None]
    w = w / np.float32(np.sqrt(k))
    if x_scale == "bf16":
        return x.astype(BF16), w.astype(BF16)
    axes = {"rowwise": (1,), "tensorwise": None}
    return (
        fp8.quantize(x, axes=axes[x_scale]),
        fp8.quantize(w, axes=axes[w_scale]),
    )


def _reference(x, w, vectors, epilogue):
    """Returns y, xhat and rstd in float64."""
    x, w = (
        np.asarray(v.dequantize() if isinstance(v, Fp8Array) else v).astype(np.float64)
        for v in (x, w)
    )
    return support.forward(x @ w.T, vectors, epilogue)


# Every norm and every activation; those with an input scale with and without gamma.
@pytest.mark.parametrize(
    "norm, activation",
    [
        ("none", "relu"),
        support.slow("none", "gelu"),
        ("layer", "none"),
        ("layer", "swish"),
        ("rms", "gelu"),
        support.slow("block", "swish"),
        ("block", "hard_swish"),
    ],
)
def test_every_norm_and_activation(run, norm, activation):
    x, w = _operands(192, 64, 64)
    vectors, epilogue = support.affine(64, norm), Epilogue(norm, activation)
    want = Outputs(y=True, y_fp8="rowwise", xhat=BF16, rstd=norm != "none")
    config = TuningConfig(store_subtile_bytes=64)
    out = run(x, w, vectors, epilogue=epilogue, want=want, config=config)
    y, xhat, rstd = _reference(x, w, vectors, epilogue)
    assert sqnr_db(y, out.y) > BF16_DB
    assert sqnr_db(xhat, out.xhat) > BF16_DB
    y_fp8 = out.y_fp8.dequantize()
    assert sqnr_db(y, y_fp8) > FLOOR_DB["cast_e4m3"]
    # Activations leave many values far below a row's largest.
    assert np.min(sqnr_db(y, y_fp8, axis=1)) > FLOOR_DB["cast_e4m3"] - 4
    if norm != "none":
        np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)


@pytest.mark.parametrize(
    "m, k, n, x_scale, w_scale, config",
    [
        (320, 64, 128, "rowwise", "tensorwise", TuningConfig(2, 2, 1, 64, 2)),
        (64, 512, 128, "tensorwise", "rowwise", TuningConfig(4, 2, 1, 64, 1)),
        (128, 192, 64, "rowwise", "rowwise", TuningConfig(1, 2, 1, 64, 1)),
        support.slow(
            *(448, 64, 192, "tensorwise", "tensorwise"), TuningConfig(2, 1, 1, 64, 1)
        ),
    ],
)
def test_shapes_scales_and_configs(run, m, k, n, x_scale, w_scale, config):
    x, w = _operands(m, k, n, x_scale=x_scale, w_scale=w_scale)
    vectors = support.affine(n, "layer")._replace(bias=normal(n, seed=5))
    epilogue = Epilogue("layer", "swish")
    want = Outputs(y=False, y_fp8="tensorwise", xhat=E4M3, rstd=True, y_amax=True)
    static = dict(epilogue=epilogue, want=want, config=config)
    out = run(x, w, vectors, y_scale_inv=jnp.float32(2.0**-5), **static)
    y, xhat, rstd = _reference(x, w, vectors, epilogue)
    assert out.y is None
    assert sqnr_db(y, out.y_fp8.dequantize()) > FLOOR_DB["cast_e4m3"]
    stored = np.asarray(out.xhat, np.float32) * XHAT_SCALE_INV
    assert sqnr_db(xhat, stored) > FLOOR_DB["cast_e4m3"]
    np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)
    np.testing.assert_allclose(out.y_amax.max(0), np.abs(y).max(1), rtol=4e-3)


@pytest.mark.parametrize("norm", ["layer", "none"])
def test_bfloat16_operands(run, norm):
    x, w = _operands(192, 128, 128, x_scale="bf16")
    vectors = support.affine(128, norm)._replace(bias=normal(128, seed=5))
    epilogue = Epilogue(norm, "gelu")
    out = run(x, w, vectors, epilogue=epilogue, want=Outputs(y=True, xhat=BF16))
    y, xhat, _ = _reference(x, w, vectors, epilogue)
    assert sqnr_db(y, out.y) > BF16_DB
    assert sqnr_db(xhat, out.xhat) > BF16_DB


# TMA cuts the last row tile off: one row group of 8, several, and more than one CTA's.
@pytest.mark.parametrize(
    "m, norm, x_scale",
    [
        (72, "layer", "rowwise"),
        (200, "none", "tensorwise"),
        support.slow(104, "rms", "bf16"),
        support.slow(136, "block", "rowwise"),
        support.slow(1000, "layer", "tensorwise"),
    ],
)
def test_rows_beyond_the_last_whole_tile(run, m, norm, x_scale):
    x, w = _operands(m, 64, 64, x_scale=x_scale)
    vectors, epilogue = support.affine(64, norm), Epilogue(norm, "swish")
    outputs = dict(xhat=BF16, rstd=norm != "none", y_amax=True)
    want = Outputs(y=True, y_fp8="rowwise", **outputs)
    config = TuningConfig(store_subtile_bytes=64)
    out = run(x, w, vectors, epilogue=epilogue, want=want, config=config)
    y, xhat, rstd = _reference(x, w, vectors, epilogue)
    # The last rows by themselves, too: they are few.
    for rows in (slice(None), slice(m // 64 * 64, None)):
        assert sqnr_db(y[rows], out.y[rows]) > BF16_DB - 1
        assert sqnr_db(xhat[rows], out.xhat[rows]) > BF16_DB - 1
        y_fp8 = out.y_fp8.dequantize()[rows]
        assert sqnr_db(y[rows], y_fp8) > FLOOR_DB["cast_e4m3"] - 1
    np.testing.assert_allclose(out.y_amax.max(0), np.abs(y).max(1), rtol=4e-3)
    if norm != "none":
        np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)


def test_row_scales_are_powers_of_two_and_zero_rows_stay_zero(run):
    x, w = _operands(64, 64, 64, x_scale="bf16")
    x = x.at[3].set(0.0)
    want = Outputs(y=False, y_fp8="rowwise")
    out = run(x, w, epilogue=Epilogue("none", "relu"), want=want).y_fp8
    assert np.all(np.log2(out.scale_inv) % 1 == 0)
    assert np.all(np.asarray(out.data[3], np.float32) == 0)
    largest = np.abs(np.asarray(out.data, np.float32)).max(1)
    # The largest value of a row uses the upper half of the format.
    assert np.all((largest[:3] > 448 / 2 - 16) & (largest[:3] <= 448))


def test_nan_stays_nan(run):
    x, w = _operands(64, 64, 64, x_scale="bf16")
    x = x.at[5, 7].set(jnp.nan)
    want = Outputs(y=True, y_fp8="rowwise")
    out = run(x, w, epilogue=Epilogue("rms"), want=want)
    is_nan = np.isnan(np.asarray(out.y, np.float32))
    assert is_nan[5].all() and not is_nan[:5].any() and not is_nan[6:].any()
    assert np.isnan(np.asarray(out.y_fp8.dequantize())[5]).all()


def test_vmap_over_rows_shares_the_weight(run):
    x, w = _operands(128, 64, 64, x_scale="bf16")
    vectors, epilogue = support.affine(64, "layer"), Epilogue("layer", "relu")
    f = lambda x: run(x, w, vectors, epilogue=epilogue, want=Outputs()).y  # noqa: E731
    y, whole = jax.vmap(f)(x.reshape(2, 64, 64)), f(x)
    assert jnp.array_equal(y.reshape(128, 64), whole)


def _problem(m=192, k=64, n=64, norm="layer", **kwargs):
    spec = SiteSpec(m=m, k=k, n=n, norm=norm, activation="swish")
    return Problem(spec=spec, **(dict(dtype=E4M3, want=Outputs()) | kwargs))


@pytest.mark.parametrize(
    "problem, reason",
    [
        (_problem(m=0), "m=0 rows are fewer than 64"),
        (_problem(m=100), "m=100 is not a multiple of 8"),
        (_problem(k=100), "k=100 is not"),
        (_problem(n=72), "n=72 is not"),
        (_problem(dtype=jnp.float32), "float32 operands"),
        (_problem(k=4096, n=512), "4096 x 512 does not fit"),
        (_problem(n=320, norm="block", has_affine=False), "block of 256"),
        (_problem(norm="block"), "no gamma"),
        (_problem(norm="none", want=Outputs(xhat=E4M3)), "may not fit E4M3"),
    ],
)
def test_why_not(problem, reason):
    assert reason in why_not(problem)


@pytest.mark.parametrize(
    "config, reason",
    [
        (TuningConfig(pipeline_stages=1), "takes 2 pipeline stages"),
        (TuningConfig(store_subtile_bytes=256), "multiple of a store"),
        (TuningConfig(pipeline_stages=16), "bytes of shared memory"),
        (TuningConfig(pipeline_stages=17), "more than 32 barriers"),
    ],
)
def test_configs_that_do_not_fit_are_refused(config, reason):
    x, w = _operands(64, 192, 64, x_scale="bf16")
    with pytest.raises(ValueError, match=reason):
        dense_norm(x, w, epilogue=Epilogue("none"), want=Outputs(), config=config)


def test_unserved_problems_are_refused():
    x, w = _operands(100, 64, 64, x_scale="bf16")
    with pytest.raises(ValueError, match="m=100 is not a multiple of 8"):
        dense_norm(x, w, epilogue=Epilogue("none"), want=Outputs())


ROWWISE = Outputs(y=False, y_fp8="rowwise")
TRAINING = Outputs(y=True, y_fp8="tensorwise", xhat=E4M3, rstd=True, y_amax=True)


def _lowers(problem, config):
    """Lowers a launch for CUDA without a GPU: layouts and shared memory are checked."""
    spec, want = problem.spec, problem.want
    epilogue = Epilogue(spec.norm, spec.activation)
    f32, shape = jnp.float32, jax.ShapeDtypeStruct

    def f(x, w, x_scale, scale):
        return dense_norm(
            Fp8Array(x, x_scale),
            Fp8Array(w, scale),
            support.affine(spec.n, spec.norm),
            epilogue=epilogue,
            want=want,
            y_scale_inv=scale if want.y_fp8 == "tensorwise" else None,
            config=config,
        )

    x_scale = shape((spec.m, 1) if problem.x_scale_by_row else (), f32)
    x, w = shape((spec.m, spec.k), E4M3), shape((spec.n, spec.k), E4M3)
    return support.lowers(f, x, w, x_scale, shape((), f32))


@pytest.mark.parametrize(
    "k, n, want",
    [
        (128, 128, Outputs()),
        (256, 256, TRAINING),
        (512, 256, ROWWISE),
        (512, 512, ROWWISE),
        support.slow(512, 512, TRAINING),
    ],
)
def test_default_configs_lower_for_cuda(k, n, want):
    problem = _problem(8192, k, n, want=want, x_scale_by_row=True)
    assert _lowers(problem, best_config(problem))


@pytest.mark.parametrize(
    "k, n, want", [(256, 256, TRAINING), support.slow(512, 512, ROWWISE)]
)
def test_rows_in_multiples_of_8_lower_for_cuda(k, n, want):
    problem = _problem(5000, k, n, want=want, x_scale_by_row=True)
    assert _lowers(problem, best_config(problem))


# Weights and columns that no other test has, which leave few configs.
@pytest.mark.parametrize(
    "k, n, norm", [(192, 128, "none"), (320, 128, "layer"), (832, 256, "block")]
)
def test_default_configs_of_odd_shapes_lower_for_cuda(k, n, norm):
    want = Outputs(y=True, xhat=BF16, rstd=norm != "none")
    has_affine = norm == "layer"
    problem = _problem(8192, k, n, norm=norm, want=want, has_affine=has_affine)
    if why_not(problem) is None:
        assert _lowers(problem, best_config(problem))
    else:
        assert search_space(problem) == []


@pytest.mark.parametrize("n, n_tiles", [(128, 1), (256, 1), (512, 2), (1024, 4)])
def test_n_tiles_are_the_blocks_of_a_block_norm(n, n_tiles):
    problem = _problem(n=n, k=64, norm="block", has_affine=False, want=Outputs(y=True))
    assert {config.n_tiles for config in search_space(problem)} == {n_tiles}


@pytest.mark.slow
@pytest.mark.parametrize("k, n", [(128, 128), (256, 256), (512, 512)])
def test_the_search_space_lowers_for_cuda(k, n):
    problem = _problem(8192, k, n, want=ROWWISE)
    space = search_space(problem)
    assert len(space) > 3
    for config in space:
        assert _lowers(problem, config)


def _poison(*shapes):
    """Leaves NaN in the memory that the next outputs are likely to get."""
    for shape in shapes:
        jnp.full(shape, jnp.nan, jnp.float32).block_until_ready().delete()


SHAPES = [(128, 128), (256, 256), (512, 256), (512, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "norm, activation, k, n",
    [("layer", activation, 256, 256) for activation in ACTIVATIONS]
    + [("none", activation, 256, 256) for activation in ACTIVATIONS]
    + [(norm, "swish", *shape) for norm in ("layer", "block") for shape in SHAPES]
    + [
        ("none", "relu", 512, 512),
        ("rms", "gelu", 128, 128),
        ("rms", "gelu", 512, 512),
    ],
)
def test_on_the_device(norm, activation, k, n):
    _check_on_the_device(64 * 300, norm, activation, k, n)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [72, 5000, 50_008])
@pytest.mark.parametrize(
    "norm, k, n", [("layer", 256, 256), ("rms", 128, 128), ("layer", 512, 512)]
)
def test_rows_in_multiples_of_8_on_the_device(m, norm, k, n):
    _check_on_the_device(m, norm, "swish", k, n)


def _check_on_the_device(m, norm, activation, k, n):
    x, w = _operands(m, k, n)
    vectors, epilogue = support.affine(n, norm), Epilogue(norm, activation)
    xhat_dtype = BF16 if norm == "none" else E4M3
    want = Outputs(y=True, y_fp8="rowwise", xhat=xhat_dtype, rstd=norm != "none")
    launch = jax.jit(functools.partial(dense_norm, epilogue=epilogue, want=want))
    _poison((m, n), (m, n), (m,))
    out = launch(x, w, vectors)
    y, xhat, rstd = _reference(x, w, vectors, epilogue)
    # FP8 sums of products keep fewer bits on the tensor cores, tanh is approximate.
    assert sqnr_db(y, out.y) > 50
    assert sqnr_db(y, out.y_fp8.dequantize()) > FLOOR_DB["cast_e4m3"]
    factor = XHAT_SCALE_INV if xhat_dtype == E4M3 else 1.0
    stored = np.asarray(out.xhat, np.float32) * factor
    assert sqnr_db(xhat, stored) > FLOOR_DB["cast_e4m3"]
    if norm != "none":
        np.testing.assert_allclose(out.rstd, rstd, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "k, n, x_scale", [(256, 256, "rowwise"), (512, 512, "rowwise"), (256, 256, "bf16")]
)
def test_a_thousand_launches_agree_bit_by_bit(k, n, x_scale):
    x, w = _operands(8192, k, n, x_scale=x_scale)
    want = Outputs(y=True) if x_scale == "bf16" else ROWWISE
    static = dict(epilogue=Epilogue("layer", "swish"), want=want)
    f = functools.partial(dense_norm, **static)
    support.assert_launches_repeat(f, x, w, support.affine(n, "layer"))
