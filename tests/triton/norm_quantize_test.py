"""`norm_quantize` by Triton against XLA's route, interpreted and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, xla
from loka_jax.fp8 import E4M3
from loka_jax.normed import Outputs
from loka_jax.triton.norm_quantize import norm_quantize, why_not
from tests import support
from tests.triton.support import (
    compiled,
    interpreted,
    launcher,
    on_gpu,
    spilled_bytes,
)

__all__ = ["interpreted", "on_gpu"]

run = launcher(norm_quantize)

NORMS = ("none", "layer", "rms", "block")
ROW_SCALES = Outputs(y=True, y_fp8="rowwise")
TENSOR_SCALE = Outputs(y=False, y_fp8="tensorwise")
Y_SCALE_INV = 1 / 512  # saturates beyond 0.875


def _operands(m, n, dtype=jnp.bfloat16):
    """Returns rows of different sizes and means, and parameters of the columns."""
    z = support.uneven_rows(m, n, decades=3) + support.normal(m, 1, seed=1)
    names = ("bias", "gamma", "beta")
    parameters = {x: support.normal(n, seed=i) for i, x in enumerate(names, start=2)}
    return z.astype(dtype), parameters


def _assert_rounded(x, exact, *, eps):
    """Asserts that x is the exact value rounded to a step of `eps`, or beside it."""
    x, exact = np.asarray(x, np.float32), np.asarray(exact)
    # Where values cancel, only what is small beside the row's values is as exact.
    error = 2e-6 * np.abs(exact).max(1, keepdims=True)
    np.testing.assert_array_less(np.abs(x - exact), 0.51 * eps * np.abs(exact) + error)


def _assert_cast(x, exact):
    """Asserts that x is the cast of the exact value, or beside it where it is close."""
    again = fp8.cast(exact, x.scale_inv, E4M3).dequantize()
    is_same = np.asarray(x.dequantize() == again)
    assert is_same.mean() > 0.99
    scale_inv = np.broadcast_to(np.asarray(x.scale_inv), is_same.shape)
    # Beside it: one step, of an eighth of its size, or of the least of the format.
    step = np.maximum(np.abs(np.asarray(again)) / 8, 2.0**-9 * scale_inv)
    assert np.all(np.abs(np.asarray(x.dequantize() - again)) <= 1.01 * step)


def _check(run, m, n, norm, activation, want, dtype=jnp.bfloat16):
    z, parameters = _operands(m, n, dtype)
    names = dict(norm=norm, activation=activation, epsilon=1e-3)
    y_scale_inv = jnp.float32(Y_SCALE_INV) if want.y_fp8 == "tensorwise" else None
    out = run(z, **parameters, **names, want=want, y_scale_inv=y_scale_inv)
    exact = xla.norm_activation(z, **parameters, **names)
    assert (out.y is None) == (not want.y) and out.xhat is None and out.rstd is None
    if want.y:
        assert out.y.dtype == jnp.bfloat16
        _assert_rounded(out.y, exact, eps=2**-7)
    if want.y_fp8 == "rowwise":
        expected = fp8.quantize(exact, E4M3, axes=(1,)).scale_inv
        assert np.mean(np.asarray(out.y_fp8.scale_inv == expected)) > 0.98
        _assert_cast(out.y_fp8, exact)
    if want.y_fp8 == "tensorwise":
        assert out.y_fp8.scale_inv == Y_SCALE_INV
        _assert_cast(out.y_fp8, exact)


@pytest.mark.parametrize("want", [ROW_SCALES, TENSOR_SCALE])
@pytest.mark.parametrize("activation", ["none", "relu", "swish", "hard_swish", "gelu"])
def test_activations(run, activation, want):
    _check(run, 70, 200, "layer", activation, want)


@pytest.mark.parametrize("n", [1, 48, 256, 300, 768, 1000, 4100])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_and_widths(run, norm, n):
    _check(run, 20, n, norm, "swish", ROW_SCALES)


@pytest.mark.parametrize("norm", NORMS)
def test_float32_rows(run, norm):
    _check(run, 20, 520, norm, "relu", Outputs(y=True), jnp.float32)


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("n", [128, 512, 2048, 8192])
@pytest.mark.parametrize("norm", NORMS)
def test_many_programs(norm, n):
    _check(norm_quantize, 10_001, n, norm, "swish", ROW_SCALES)
    _check(norm_quantize, 10_001, n, norm, "gelu", TENSOR_SCALE)


def test_no_parameters(run):
    z, _ = _operands(20, 200)
    out = run(z, norm="rms", activation="none", want=Outputs(y=True))
    exact = xla.norm_activation(z, norm="rms", activation="none")
    _assert_rounded(out.y, exact, eps=2**-7)
    assert out.y_fp8 is None


def test_a_large_mean_costs_no_digits(run):
    z = 4096 + 32 * jnp.round(support.normal(20, 200))
    names = dict(norm="layer", activation="none")
    out = run(z.astype(jnp.bfloat16), **names, want=Outputs(y=True))
    z = np.asarray(z, np.float64) - np.asarray(z, np.float64).mean(1, keepdims=True)
    _assert_rounded(out.y, z / np.sqrt((z**2).mean(1, keepdims=True)), eps=2**-7)


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 448.0, 449.0, 3e38])
def test_scales_of_rows_are_those_of_quantize(run, size):
    rows = jnp.full((3, 64), size, jnp.float32) * jnp.asarray([[1.0], [-1.0], [0.75]])
    out = run(rows, norm="none", activation="none", want=ROW_SCALES)
    expected = fp8.quantize(rows, E4M3, axes=(1,))
    np.testing.assert_array_equal(out.y_fp8.scale_inv, expected.scale_inv)
    np.testing.assert_array_equal(out.y_fp8.dequantize(), expected.dequantize())


@pytest.mark.parametrize("norm", ["none", "rms"])
def test_rows_with_nan_are_nan_and_others_are_not(run, norm):
    z = jnp.ones((20, 200), jnp.float32)
    z = z.at[3].set(0).at[5, 7].set(jnp.nan).at[6, 8].set(jnp.inf)
    out = run(z, norm=norm, activation="relu", want=ROW_SCALES)
    values = np.asarray(out.y_fp8.dequantize())
    assert np.isnan(values[[5, 6]]).all() and np.isnan(np.asarray(out.y)[5, 7])
    assert np.isfinite(np.delete(values, [5, 6], 0)).all()
    np.testing.assert_array_equal(values[3], 0)


def test_under_a_given_scale_nan_stays_and_the_rest_saturates(run):
    z = jnp.asarray([[1.0, -1e30, 1e30, jnp.inf, jnp.nan, 0.25]])
    rest = dict(want=TENSOR_SCALE, y_scale_inv=jnp.float32(Y_SCALE_INV))
    out = run(z, norm="none", activation="none", **rest).y_fp8.dequantize()
    np.testing.assert_array_equal(out, [[0.875, -0.875, 0.875, 0.875, np.nan, 0.25]])


@pytest.mark.parametrize("n", [48, 512, 1000, 8192])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("want", [ROW_SCALES, TENSOR_SCALE, Outputs(y=True)])
def test_programs_for_hopper_do_not_spill(want, norm, n):
    names = dict(norm=norm, activation="swish", want=want)

    def f(z, gamma, beta, scale_inv):
        given = dict(y_scale_inv=scale_inv) if want.y_fp8 == "tensorwise" else {}
        return norm_quantize(z, gamma=gamma, beta=beta, **names, **given)

    shape = jax.ShapeDtypeStruct
    z, column = shape((65536, n), jnp.bfloat16), shape((n,), jnp.float32)
    program = compiled(f, z, column, column, shape((), jnp.float32))
    assert spilled_bytes(program.ptxas_report()) == 0
    assert ("cvt.rn.satfinite.e4m3x2.f32" in program.ptx) == bool(want.y_fp8)
    assert "ld.global.v4" in program.ptx


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_launches_repeat_bit_by_bit():
    z, parameters = _operands(10_001, 1024)
    names = dict(norm="layer", activation="swish", want=ROW_SCALES)
    f = jax.jit(functools.partial(norm_quantize, **names))
    first = f(z, **parameters)
    for _ in range(100):
        jax.tree.map(np.testing.assert_array_equal, first, f(z, **parameters))


@pytest.mark.parametrize(
    "m, n, reason",
    [
        (100, 8192, None),
        (100, 8193, "n=8193 is more than 8192"),
        (0, 5, "m=0, n=5: there is nothing to normalize"),
    ],
)
def test_refused_shapes_have_a_reason(m, n, reason):
    assert why_not(m, n) == reason
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            names = dict(norm="none", activation="none")
            norm_quantize(jnp.zeros((m, n)), **names, want=Outputs())


@pytest.mark.parametrize("extra", [dict(rstd=True), dict(xhat=E4M3), dict(y_amax=True)])
def test_what_only_training_needs_is_refused(extra):
    with pytest.raises(ValueError, match="writes y and y_fp8 only"):
        names = dict(norm="rms", activation="none")
        norm_quantize(jnp.zeros((8, 8)), **names, want=Outputs(**extra))
