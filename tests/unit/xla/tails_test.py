"""XLA's tails, which the kernels are compared with, against numpy in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import xla
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.normed import Epilogue, NormVectors, xhat_scale_inv
from loka_jax.tails import Forms, Outer, Scale, Scaled
from tests import support
from tests.support import pallas as rounding

BF16, F32 = jnp.bfloat16, jnp.float32
SHAPE, PADDED = (12, 20), (16, 32)
ALL = Forms(fp8=E4M3, transposed=True, amax=True, shape=SHAPE, padded=True)
GRADIENT = dataclasses.replace(ALL, bf16=False, fp8=E5M2)
# Of several scales in one vector; the others would make numbers NaN.
SCALES = jnp.asarray([jnp.nan, 2.0**-6, 0.5, jnp.nan, 8.0], F32)
SCALE_INV = Scale(SCALES, 1)  # E4M3 saturates beyond 7


def product(seed):
    """Returns a padded product of which a unit and two scales were not applied."""
    x = np.zeros(PADDED, np.float32)
    x[: SHAPE[0], : SHAPE[1]] = support.normal(*SHAPE, seed=seed)
    return Scaled(jnp.asarray(x, BF16), (Scale(SCALES, 2), Scale(SCALES, 4)), unit=0.25)


def exact(x):
    """Returns the float64 matrix without padding."""
    if isinstance(x, Outer):
        return np.outer(*(np.asarray(v, np.float64) for v in (x.column, x.row)))
    factor = 0.25 * 0.5 * 8.0 if x.scales else 1.0
    return factor * np.asarray(x.data, np.float64)[: SHAPE[0], : SHAPE[1]]


def vector(size, seed):
    return support.normal(size, seed=seed)


def assert_written(written, y, want):
    """Asserts that every form is the matrix rounded, and followed by zeros."""
    error = 1e-5 * (1 + np.abs(y).max())
    whole = np.zeros(want.written_shape(y.shape))
    whole[: y.shape[0], : y.shape[1]] = y
    if want.bf16:
        rounding.assert_bfloat16(written.bf16, whole, error=error)
    if want.fp8 is not None:
        rounding.assert_fp8(written.fp8.data, 2.0**-6, whole, error=error)
        assert written.fp8.data.dtype == want.fp8
    if want.transposed:
        data = np.asarray(written.fp8.data.T, np.float32)
        np.testing.assert_array_equal(np.asarray(written.fp8.data_t, np.float32), data)
    if want.amax:
        np.testing.assert_allclose(jnp.max(written.amaxes), np.abs(y).max(), rtol=1e-5)
    wanted = want.bf16, want.fp8, want.amax
    assert [x is not None for x in written] == [bool(x) for x in wanted]


def run(function, *args, **options):
    """Returns the results of a tail, compiled as a whole."""
    return jax.jit(functools.partial(function, **options))(*args)


@pytest.mark.parametrize("has_outer", [False, True])
def test_a_cross_tail_is_x0_times_the_sum_of_the_rest(has_outer):
    first = Outer(vector(12, 5), vector(20, 6)) if has_outer else product(0)
    summands, x0, bias, head = [first, product(1)], product(2), vector(20, 3), None
    options = dict(want=ALL, y_scale_inv=SCALE_INV, keep_s=True, has_row_sum=True)
    if not has_outer:
        head = vector(20, 4)
    out = run(xla.cross_tail, summands, x0, bias, head, **options)
    s = exact(first) + exact(summands[1]) + np.asarray(bias)
    y = exact(x0) * s
    assert np.abs(y).max() > 7  # some saturate
    assert_written(out.y, y, ALL)
    padded = np.pad(s, ((0, 4), (0, 12)))
    rounding.assert_bfloat16(out.s, padded, error=1e-5)
    np.testing.assert_allclose(out.row_sum, y.sum(0), rtol=1e-5, atol=1e-5)
    assert (out.dots is None) == (head is None)
    if head is not None:
        np.testing.assert_allclose(out.dots, y @ np.asarray(head), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("has_head", [False, True])
def test_the_gradient_of_features_sums_that_of_every_layer(has_head):
    gradients, products = [product(0), product(1)], [product(2), product(3)]
    gradients.append(Outer(vector(12, 5), vector(20, 6)) if has_head else product(4))
    biases, x0 = [None, vector(20, 8)], product(9) if has_head else None
    other = product(7) if has_head else None
    parts = [jax.ShapeDtypeStruct((12, n), BF16) for n in (13, 5)]
    args = gradients, products, biases, other, x0
    out = run(xla.cross_gradient, *args, parts=parts, shape=SHAPE)
    total, s = exact(gradients[0]) + (exact(other) if has_head else 0.0), 1.0
    for d, z, bias in zip(gradients[1:], products, biases, strict=True):
        s = s + exact(z) + (0.0 if bias is None else np.asarray(bias))
        total = total + exact(d) * s
    error = 1e-5 * (1 + np.abs(total).max())
    rounding.assert_bfloat16(out.x0[0], total[:, :13], error=error)
    rounding.assert_bfloat16(out.x0[1], total[:, 13:18], error=error)
    assert (out.head is not None) == has_head
    if has_head:
        head = np.asarray(gradients[2].column) @ (exact(x0) * s)
        np.testing.assert_allclose(out.head, head, rtol=1e-5, atol=1e-4)


def test_joined_features_are_followed_by_zeros():
    first, second = support.normal(12, 7), support.normal(12, 10, seed=1).astype(BF16)
    out = run(xla.joined_cast, first, second, want=ALL, scale_inv=SCALE_INV)
    joined = [np.asarray(first), np.asarray(second, np.float64), np.zeros((12, 3))]
    assert_written(out, np.concatenate(joined, axis=1), ALL)


def vectors_of(norm):
    """Returns a bias, and gamma and beta of a norm of whole rows."""
    bias, gamma, beta = (vector(20, seed) for seed in (3, 6, 7))
    of_rows = norm in ("layer", "rms")
    return NormVectors(bias, *((1 + gamma / 4, beta) if of_rows else ()))


@pytest.mark.parametrize(
    "norm, activation, kept",
    [
        ("none", "swish", E4M3),
        ("block", "relu", E4M3),
        ("layer", "hard_swish", BF16),
        ("rms", "gelu", None),
    ],
)
def test_a_norm_tail_is_activation_and_norm_of_the_sum(norm, activation, kept):
    z, r = product(0), support.normal(*SHAPE, seed=1).astype(BF16)
    vectors, epilogue = vectors_of(norm), Epilogue(norm, activation, 1e-2)
    options = dict(epilogue=epilogue, want=ALL, y_scale_inv=SCALE_INV, xhat=kept)
    out = run(xla.norm_tail, z, r, vectors, **options)
    argument = exact(z) + np.asarray(r, np.float64)
    y, xhat, rstd = rounding.forward(argument, vectors, epilogue)
    assert_written(out.y, y, ALL)
    if kept is None:
        assert out.residuals is None
        return
    whole = np.pad(xhat, ((0, 4), (0, 12)))
    if norm == "none" or kept == BF16:
        rounding.assert_bfloat16(out.residuals.xhat, whole, error=1e-5)
    else:
        scale_inv = xhat_scale_inv(norm, 20)
        rounding.assert_fp8(out.residuals.xhat, scale_inv, whole, error=1e-5)
    if norm == "none":
        assert out.residuals.rstd is None
    else:
        np.testing.assert_allclose(out.residuals.rstd, rstd, rtol=1e-5)
