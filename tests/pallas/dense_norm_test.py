"""The fused forward kernel against numpy, in the interpreter with its race detector.

"Is the kernel right?" is asked against the dequantized operands in float32: bfloat16
outputs to their rounding, FP8 outputs to theirs.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax import fp8
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import XHAT_SCALE_INV, Outputs
from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm import dense_norm
from loka_jax.pallas.dense_norm_plan import (
    Problem,
    Settings,
    best_settings,
    search_space,
    why_not,
)
from tests.support import FLOOR_DB, normal, sqnr_db

BF16 = jnp.bfloat16
NORMS = ("none", "layer", "rms", "block")
ACTIVATIONS = ("none", "relu", "swish", "hard_swish", "gelu")
# bfloat16 rounds to 2**-9: 59 dB, less what a half-precision intermediate costs.
BF16_DB = 54.0


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    """Few CTAs, so that each walks over several row tiles; a clean interpreter."""
    monkeypatch.setattr(tiles, "SMS", 2)
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    yield
    interpret_pallas_call.reset_gpu_interpret_mode_state()


def _interpreted(*args, **kwargs):
    params = plgpu.InterpretGPUParams(detect_races=True)
    out = jax.block_until_ready(dense_norm(*args, interpret=params, **kwargs))
    assert not interpret_pallas_call.get_races().races_found
    return out


def _activate(name, u):
    match name:
        case "none":
            return u
        case "relu":
            return np.maximum(u, 0)
        case "swish":
            return u / (1 + np.exp(-u))
        case "hard_swish":
            return u * np.clip(u + 3, 0, 6) / 6
        case "gelu":
            return u / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))


def _reference(x, w, norm, activation, *, bias=0.0, gamma=1.0, beta=0.0):
    """Returns xhat, 1 / deviation and y in float64."""
    x, w, bias, gamma, beta = (
        np.asarray(v, np.float64) for v in (x, w, bias, gamma, beta)
    )
    z = x @ w.T + bias
    rstd = np.ones(len(z))
    if norm != "none":
        centre = z.mean(1, keepdims=True) if norm == "layer" else 0.0
        rstd = 1 / np.sqrt(np.mean((z - centre) ** 2, axis=1) + 1e-6)
        z = (z - centre) * rstd[:, None]
    return z, rstd, _activate(activation, z * gamma + beta)


def _operands(m, k, n, *, x_scale="rowwise", w_scale="tensorwise"):
    # Rows and columns of different sizes, so that a scale in the wrong place shows.
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


def _wide(x):
    return x.dequantize() if isinstance(x, Fp8Array) else x.astype(jnp.float32)


def _affine(n):
    return {
        "gamma": 1 + 0.2 * normal(n, seed=3),
        "beta": 0.2 * normal(n, seed=4),
    }


@pytest.mark.parametrize(
    "norm, activation", list(itertools.product(NORMS, ACTIVATIONS))
)
def test_every_norm_and_activation(norm, activation):
    m, k, n = 192, 64, 128
    x, w = _operands(m, k, n)
    affine = {} if norm in ("none", "block") else _affine(n)
    want = Outputs(y=True, y_fp8="rowwise", xhat=BF16, rstd=norm != "none")
    settings = Settings(teams=2, stages=2, piece_bytes=128, slots=1)
    out = _interpreted(
        x, w, norm=norm, activation=activation, want=want, settings=settings, **affine
    )
    xhat, rstd, y = _reference(_wide(x), _wide(w), norm, activation, **affine)
    assert sqnr_db(y, out.y) > BF16_DB
    assert sqnr_db(xhat, out.xhat) > BF16_DB
    y_fp8 = out.y_fp8.dequantize()
    assert sqnr_db(y, y_fp8) > FLOOR_DB["cast_e4m3"]
    # Activations leave many values far below a row's largest.
    assert np.min(sqnr_db(y, y_fp8, axis=1)) > FLOOR_DB["cast_e4m3"] - 4
    if norm != "none":
        np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)


@pytest.mark.parametrize(
    "m, k, n, x_scale, w_scale, settings",
    [
        (320, 256, 256, "rowwise", "tensorwise", Settings(2, 2, 1, 128, 2)),
        (64, 512, 128, "tensorwise", "rowwise", Settings(4, 2, 1, 64, 1)),
        (128, 192, 64, "rowwise", "rowwise", Settings(1, 2, 1, 64, 1)),
        (448, 128, 192, "tensorwise", "tensorwise", Settings(2, 1, 1, 64, 1)),
    ],
)
def test_layouts_scales_and_settings(m, k, n, x_scale, w_scale, settings):
    x, w = _operands(m, k, n, x_scale=x_scale, w_scale=w_scale)
    given = {"bias": normal(n, seed=5), **_affine(n)}
    want = Outputs(y=False, y_fp8="tensorwise", xhat=E4M3, rstd=True, y_amax=True)
    scale_inv = jnp.float32(2.0**-5)
    out = _interpreted(
        x,
        w,
        norm="layer",
        activation="swish",
        want=want,
        y_scale_inv=scale_inv,
        settings=settings,
        **given,
    )
    xhat, rstd, y = _reference(_wide(x), _wide(w), "layer", "swish", **given)
    assert out.y is None
    assert sqnr_db(y, out.y_fp8.dequantize()) > FLOOR_DB["cast_e4m3"]
    kept = np.asarray(out.xhat, np.float32) * XHAT_SCALE_INV
    assert sqnr_db(xhat, kept) > FLOOR_DB["cast_e4m3"]
    np.testing.assert_allclose(out.rstd, rstd, rtol=1e-5)
    np.testing.assert_allclose(out.y_amax.max(0), np.abs(y).max(1), rtol=4e-3)


@pytest.mark.parametrize("norm", ["layer", "none"])
def test_bfloat16_twin(norm):
    x, w = _operands(192, 128, 128, x_scale="bf16")
    given = {"bias": normal(128, seed=5)} | (_affine(128) if norm == "layer" else {})
    want = Outputs(y=True, xhat=BF16)
    out = _interpreted(x, w, norm=norm, activation="gelu", want=want, **given)
    xhat, _, y = _reference(_wide(x), _wide(w), norm, "gelu", **given)
    assert sqnr_db(y, out.y) > BF16_DB
    assert sqnr_db(xhat, out.xhat) > BF16_DB


def test_row_scales_are_powers_of_two_and_zero_rows_stay_zero():
    x, w = _operands(64, 64, 64, x_scale="bf16")
    x = x.at[3].set(0.0)
    want = Outputs(y=False, y_fp8="rowwise")
    out = _interpreted(x, w, norm="none", activation="relu", want=want).y_fp8
    assert np.all(np.log2(out.scale_inv) % 1 == 0)
    assert np.all(np.asarray(out.data[3], np.float32) == 0)
    largest = np.abs(np.asarray(out.data, np.float32)).max(1)
    # The largest value of a row uses the upper half of the format.
    assert np.all((largest[:3] > 448 / 2 - 16) & (largest[:3] <= 448))


def test_nan_stays_nan():
    x, w = _operands(64, 64, 64, x_scale="bf16")
    x = x.at[5, 7].set(jnp.nan)
    want = Outputs(y=True, y_fp8="rowwise")
    out = _interpreted(x, w, norm="rms", activation="none", want=want)
    is_nan = np.isnan(np.asarray(out.y, np.float32))
    assert is_nan[5].all() and not is_nan[:5].any() and not is_nan[6:].any()
    assert np.isnan(np.asarray(out.y_fp8.dequantize())[5]).all()


def test_vmap_over_rows_shares_the_weight():
    x, w = _operands(128, 64, 64, x_scale="bf16")
    want = Outputs(y=True)
    batched = x.reshape(2, 64, 64)

    def f(rows):
        site = dict(norm="layer", activation="relu", want=want)
        return _interpreted(rows, w, **site, **_affine(64)).y

    y = jax.vmap(f)(batched).reshape(128, 64)
    whole = f(x)
    np.testing.assert_array_equal(
        np.asarray(y, np.float32), np.asarray(whole, np.float32)
    )


def _problem(m=192, k=64, n=64, **kwargs):
    defaults = dict(dtype=E4M3, norm="layer", activation="relu", want=Outputs())
    return Problem(m=m, k=k, n=n, **(defaults | kwargs))


@pytest.mark.parametrize(
    "problem, reason",
    [
        (_problem(m=0), "m=0 is not"),
        (_problem(m=100), "m=100 is not"),
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
    "settings, reason",
    [
        (Settings(stages=1), "takes 2 stages"),
        (Settings(piece_bytes=256), "multiple of a piece"),
        (Settings(stages=64), "bytes of shared memory"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, reason):
    x, w = _operands(64, 192, 64, x_scale="bf16")
    with pytest.raises(ValueError, match=reason):
        dense_norm(
            x, w, norm="none", activation="none", want=Outputs(), settings=settings
        )


def test_unserved_problems_are_refused():
    x, w = _operands(100, 64, 64, x_scale="bf16")
    with pytest.raises(ValueError, match="m=100 is not a positive multiple of 64"):
        dense_norm(x, w, norm="none", activation="none", want=Outputs())


SHAPES = [(128, 128), (256, 256), (512, 256), (512, 512)]
TRAINING = Outputs(y=True, y_fp8="tensorwise", xhat=E4M3, rstd=True, y_amax=True)


def _lower(problem, settings):
    """Lowers a launch for CUDA without a GPU: layouts and shared memory are checked."""
    p = problem
    f32, shape = jnp.float32, jax.ShapeDtypeStruct
    x_scale = shape((p.m, 1) if p.x_scale_by_row else (), f32)
    column = shape((p.n,), f32) if p.has_affine else None

    def f(x, w, x_scale, scale, gamma, beta):
        if p.dtype == E4M3:
            x, w = Fp8Array(x, x_scale), Fp8Array(w, scale)
        return dense_norm(
            x,
            w,
            gamma=gamma,
            beta=beta,
            norm=p.norm,
            activation=p.activation,
            want=p.want,
            y_scale_inv=scale if p.want.y_fp8 == "tensorwise" else None,
            settings=settings,
        )

    operands = shape((p.m, p.k), p.dtype), shape((p.n, p.k), p.dtype)
    traced = jax.jit(f).trace(*operands, x_scale, shape((), f32), column, column)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("k, n", SHAPES)
@pytest.mark.parametrize(
    "want",
    [Outputs(y=False, y_fp8="rowwise"), Outputs(), TRAINING],
    ids=["fp8", "y", "train"],
)
def test_default_settings_lower_for_cuda(k, n, want, monkeypatch):
    monkeypatch.setattr(tiles, "SMS", 132)
    problem = _problem(8192, k, n, activation="swish", want=want, x_scale_by_row=True)
    assert "mosaic_gpu" in _lower(problem, best_settings(problem))


@pytest.mark.slow
@pytest.mark.parametrize("k, n", [(128, 128), (256, 256), (512, 512)])
def test_the_search_space_lowers_for_cuda(k, n, monkeypatch):
    monkeypatch.setattr(tiles, "SMS", 132)
    problem = _problem(
        8192, k, n, activation="swish", want=Outputs(y=False, y_fp8="rowwise")
    )
    space = search_space(problem)
    assert len(space) > 3
    for settings in space:
        assert "mosaic_gpu" in _lower(problem, settings)


def _poison(*shapes):
    """Leaves NaN in the memory that the next outputs are likely to get."""
    for shape in shapes:
        jnp.full(shape, jnp.nan, jnp.float32).block_until_ready().delete()


@pytest.mark.gpu
@pytest.mark.parametrize("k, n", [(128, 128), (256, 256), (512, 256), (512, 512)])
@pytest.mark.parametrize("norm", NORMS)
def test_on_the_device(norm, k, n, monkeypatch):
    monkeypatch.setattr(tiles, "SMS", 132)
    m = 64 * 300
    x, w = _operands(m, k, n)
    affine = {} if norm in ("none", "block") else _affine(n)
    kept = BF16 if norm == "none" else E4M3
    want = Outputs(y=True, y_fp8="rowwise", xhat=kept, rstd=norm != "none")
    # Block norms over several blocks are compared block by block.
    blocks = n // 256 if norm == "block" and n > 256 else 1
    for activation in ACTIVATIONS:
        launch = jax.jit(
            lambda x, w, name=activation: dense_norm(
                x, w, norm=norm, activation=name, want=want, **affine
            )
        )
        _poison((m, n), (m, n), (m,))
        out = launch(x, w)
        for b in range(blocks):
            part = slice(b * n // blocks, (b + 1) * n // blocks)
            xhat, rstd, y = _reference(
                _wide(x), np.asarray(_wide(w))[part], norm, activation, **affine
            )
            # FP8 sums of products keep fewer bits on the tensor cores, tanh is
            # approximate.
            assert sqnr_db(y, out.y[:, part]) > 50
            y_fp8 = out.y_fp8.dequantize()[:, part]
            assert sqnr_db(y, y_fp8) > FLOOR_DB["cast_e4m3"]
            factor = XHAT_SCALE_INV if kept == E4M3 else 1.0
            rows = np.asarray(out.xhat[:, part], np.float32) * factor
            assert sqnr_db(xhat, rows) > FLOOR_DB["cast_e4m3"]
            if norm != "none":
                found = out.rstd[b] if blocks > 1 else out.rstd
                np.testing.assert_allclose(found, rstd, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "k, n, x_scale", [(256, 256, "rowwise"), (512, 512, "rowwise"), (256, 256, "bf16")]
)
def test_a_thousand_launches_agree_bit_by_bit(k, n, x_scale, monkeypatch):
    monkeypatch.setattr(tiles, "SMS", 132)
    x, w = _operands(8192, k, n, x_scale=x_scale)
    is_twin = x_scale == "bf16"
    want = Outputs(y=True) if is_twin else Outputs(y=False, y_fp8="rowwise")
    launch = jax.jit(
        lambda x, w: jax.tree.leaves(
            dense_norm(x, w, norm="layer", activation="swish", want=want, **_affine(n))
        )
    )

    def bits(v):
        return v.view(f"uint{8 * v.dtype.itemsize}")

    @jax.jit
    def differing(a, b):
        return sum(jnp.sum(bits(p) != bits(q)) for p, q in zip(a, b, strict=True))

    first = launch(x, w)
    total = jnp.int32(0)
    for _ in range(1000):
        total += differing(first, launch(x, w))
    assert total == 0
