"""Tails of wide products by Triton against XLA's, interpreted and on a GPU."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, xla
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.normed import Epilogue, NormVectors
from loka_jax.tails import Dropout, Forms, Outer, Scale, Scaled, TailResiduals, Written
from loka_jax.triton import tails
from tests import support
from tests.support.triton import anywhere, interpreted, on_gpu, skip_without_triton

__all__ = ["anywhere", "interpreted", "on_gpu"]

skip_without_triton()

# Of several scales in one vector; the others would make numbers NaN.
SCALE_INV = Scale(jnp.asarray([jnp.nan, jnp.nan, 2.0**-4, jnp.nan], jnp.float32), 2)
IN_FP8 = dict(scale_inv=SCALE_INV, transposed=True, amax=True)
ALL, GRADIENT = Forms(fp8=E4M3, **IN_FP8), Forms(bf16=False, fp8=E5M2, **IN_FP8)
CONFIG = tails.Tile(32, 32, 1)
NARROW = tails.Tile(32, 64, 1)

anywhere_ = pytest.mark.usefixtures("anywhere")


def _product(shape, seed):
    """Returns a product of which two scales were not applied."""
    vector = jnp.asarray([jnp.nan, 0.25, 4.0], jnp.float32)
    data = support.normal(*shape, seed=seed, dtype=jnp.bfloat16)
    return Scaled(data, (Scale(vector, 1), Scale(vector, 2)), unit=0.5)


def _fp8(shape, seed):
    x = fp8.quantize(support.normal(*shape, seed=seed, dtype=jnp.bfloat16))
    return Scaled(x.data, (Scale.of(x.scale_inv),))


def _outer(shape, seed):
    column, row = (support.normal(size, seed=seed + i) for i, size in enumerate(shape))
    return Outer(column, row)


def assert_as_by_xla(ours, function, *args, row=None, **options):
    """Asserts results of XLA but for roundings of nearly equal float32 values.

    Args:
        row: the shape of sums over rows, whose terms are rounded to bfloat16.
    """
    theirs = jax.jit(functools.partial(function, **options))(*args)
    ours, theirs = (
        jax.tree.map(_whole, x, is_leaf=_is_written) for x in (ours, theirs)
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if y.dtype == jnp.float32 and y.shape == row:  # terms have 8 bits or more
            assert np.linalg.norm(x - y) <= 2**-8 * np.linalg.norm(y)
            continue
        if y.dtype == jnp.float32:  # sums, in another order
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-4)
            continue
        step = float(jnp.finfo(y.dtype).eps)
        x, y = (np.asarray(v, np.float64) for v in (x, y))
        assert np.all(np.abs(x - y) <= step * np.abs(y) + 2e-2 * step + 1e-5)
        assert np.mean(x == y) > 0.97


def _is_written(x):
    return isinstance(x, Written) and x.amaxes is not None


def _whole(x):
    """Returns a result with one amax in place of those of parts."""
    return x._replace(amaxes=jnp.max(x.amaxes)) if _is_written(x) else x


# Matrices of one tile, several, and tiles that are not full; padded operands, too.
@anywhere_
@pytest.mark.parametrize(
    "role, shape, count, is_fp8",
    [
        ("forward", (32, 32), 1, True),
        ("forward", (48, 80), 2, False),
        ("padded", (47, 79), 3, True),
        ("backward", (33, 257), 2, False),
        ("before a head", (47, 79), 3, True),
        ("behind a head", (64, 96), 3, True),
    ],
)
def test_cross_tails_are_those_of_xla(role, shape, count, is_fp8):
    make = _fp8 if is_fp8 else _product
    summands, x0 = [make(shape, i) for i in range(count)], make(shape, 3)
    if role == "padded":
        pad = lambda x: x.replace(data=fp8.pad(x.data))  # noqa: E731
        summands, x0 = [pad(x) for x in summands], pad(x0)
    bias, head = (support.normal(shape[1], seed=seed) for seed in (4, 5))
    want = ALL if role in ("forward", "padded") else GRADIENT
    want = dataclasses.replace(want, shape=shape, padded=True)
    options = dict(want=want, has_row_sum=True)
    args = summands, x0
    if role in ("forward", "padded"):
        args = summands, x0, bias
    elif role == "before a head":
        args, options = (summands, x0, bias, head), dict(want=Forms(bf16=False))
    elif role == "behind a head":
        args = [_outer(shape, 20), *summands], x0
    ours = tails.cross_tail(*args, **options, tile=CONFIG)
    assert_as_by_xla(ours, xla.cross_tail, *args, row=(shape[1],), **options)


@anywhere_
@pytest.mark.parametrize(
    "m, widths", [(48, (64, 112)), (47, (13, 70)), (47, (13, 70, 16, 5))]
)
def test_joined_casts_are_those_of_xla(m, widths):
    parts = [support.normal(m, n, seed=i) for i, n in enumerate(widths)]
    want = dataclasses.replace(ALL, shape=(m, sum(widths) + 3), padded=True)
    ours = tails.joined_cast(*parts, want=want, tile=CONFIG)
    assert_as_by_xla(ours, xla.joined_cast, *parts, want=want)


@anywhere_
@pytest.mark.parametrize(
    "shape, depth, start, zeros, is_fp8, has_head",
    [
        ((47, 79), 1, 0, 0, False, True),
        ((64, 96), 2, 13, 5, False, True),
        ((47, 79), 2, 64, 5, True, False),
        ((64, 96), 3, 16, 0, False, False),
    ],
)
def test_gradients_of_features_are_those_of_xla(
    shape, depth, start, zeros, is_fp8, has_head
):
    m, n = shape
    make = _fp8 if is_fp8 else _product
    all_d = [make(shape, i) for i in range(depth)]
    all_d.append(_outer(shape, 40) if has_head else make(shape, depth))
    x0 = make(shape, 50) if has_head else None
    all_z = [make(shape, 10 + i) for i in range(depth)]
    biases = [None, *(support.normal(n, seed=20 + i) for i in range(1, depth))]
    other = make(shape, 30) if depth == 2 else None
    widths = [start, n - start - zeros] if start else [n - zeros]
    parts = tuple(jax.ShapeDtypeStruct((m, width), jnp.bfloat16) for width in widths)
    gradients = [[d] for d in all_d]
    gradients[0] += [other] if depth == 2 else []
    args, options = (gradients, all_z, biases, x0), dict(parts=parts, shape=shape)
    ours = tails.cross_gradient(*args, **options, tile=CONFIG)
    assert (ours[1] is not None) == has_head
    assert_as_by_xla(ours, xla.cross_gradient, *args, **options)


@anywhere_
@pytest.mark.parametrize(
    "shape, norm, activation, tile",
    [
        ((64, 512), "block", "hard_swish", None),
        ((47, 79), "block", "swish", None),
        ((33, 257), "none", "gelu", None),
        ((33, 80), "none", "exact_gelu", None),
        ((48, 80), "none", "tanh", None),
        ((32, 336), "layer", "gelu", None),
        ((47, 79), "layer", "hard_swish", None),
        ((48, 80), "rms", "relu", None),
        ((48, 80), "layer", "sigmoid", None),
        ((40, 1200), "rms", "none", None),
        # Tiles narrower than a row, whose statistics a kernel before computes.
        ((47, 79), "layer", "gelu", NARROW),
        ((47, 300), "layer", "swish", NARROW),
        ((40, 300), "rms", "none", NARROW),
    ],
)
def test_norm_tails_and_their_gradients_are_those_of_xla(shape, norm, activation, tile):
    bias, gamma, beta = (support.normal(shape[1], seed=seed) for seed in (3, 6, 7))
    has_vectors, epilogue = norm in ("layer", "rms"), Epilogue(norm, activation)
    vectors = NormVectors(bias, *((1 + gamma / 4, beta) if has_vectors else ()))
    z, r = _product(shape, 0), support.normal(*shape, seed=1, dtype=jnp.bfloat16)
    forms = (dataclasses.replace(x, shape=shape, padded=True) for x in (ALL, GRADIENT))
    options = dict(epilogue=epilogue, want=next(forms))
    args = [z, Scaled(r)], vectors
    ours = tails.norm_tail(*args, **options, tile=tile)
    assert_as_by_xla(ours, xla.norm_tail, *args, **options)
    options = dict(epilogue=epilogue, want=next(forms))
    args = [_product(shape, 4), Scaled(2 * r)], ours[1], vectors
    ours = tails.norm_tail_backward(*args, **options, tile=tile)
    row = shape[1:]
    assert_as_by_xla(ours, xla.norm_tail_backward, *args, row=row, **options)


@anywhere_
@pytest.mark.parametrize(
    "order, norm, activation, tile",
    [
        ("norm_act_sum", "rms", "gelu", None),
        ("norm_act_sum", "none", "none", None),
        ("act_sum_norm", "layer", "sigmoid", None),
        ("act_sum_norm", "rms", "none", NARROW),
        ("act_norm", "layer", "relu", NARROW),
        ("norm_act_mul", "layer", "swish", NARROW),
        ("norm_act_mul", "none", "exact_gelu", None),
    ],
)
def test_orders_of_norm_tails_are_those_of_xla(order, norm, activation, tile):
    shape = 47, 79
    bias, gamma, beta = (support.normal(shape[1], seed=seed) for seed in (3, 6, 7))
    affine = (1 + gamma / 4, beta) if norm != "none" else ()
    vectors, epilogue = (
        NormVectors(bias, *affine),
        Epilogue(norm, activation, 0.0, order),
    )
    z, r = _product(shape, 0), support.normal(*shape, seed=1, dtype=jnp.bfloat16)
    words = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)
    rest = vectors, Dropout(words, 0.25)
    forms = (dataclasses.replace(x, shape=shape, padded=True) for x in (ALL, GRADIENT))
    options = dict(epilogue=epilogue, want=next(forms))
    options["xhat"] = jnp.bfloat16
    args = [z, Scaled(r)][: 1 + (order != "act_norm")], *rest
    ours = tails.norm_tail(*args, **options, tile=tile)
    assert_as_by_xla(ours, xla.norm_tail, *args, **options)
    _, residuals = ours
    if norm == activation == "none":
        residuals = TailResiduals()
    options = dict(epilogue=epilogue, want=next(forms))
    args = [_product(shape, 4)], residuals, *rest
    ours = tails.norm_tail_backward(*args, **options, tile=tile)
    assert (ours.residual is not None) == (order in ("act_sum_norm", "norm_act_mul"))
    assert_as_by_xla(ours, xla.norm_tail_backward, *args, row=shape[1:], **options)


@anywhere_
def test_values_beyond_the_scale_saturate_and_nan_stays():
    zeros = jnp.zeros((32, 32), jnp.bfloat16)
    x = zeros.at[3, 5].set(1e6).at[7, 2].set(-1e6).at[9, 4].set(jnp.nan)
    x, ones = x.at[11, 1].set(jnp.inf), jnp.ones_like(zeros)
    y = tails.cross_tail([Scaled(x)], Scaled(ones), want=ALL, tile=CONFIG).y
    data = np.asarray(y.fp8, np.float32)
    np.testing.assert_array_equal(data.T, np.asarray(y.fp8_t, np.float32))
    assert (data[3, 5], data[7, 2], data[11, 1]) == (448.0, -448.0, 448.0)
    assert np.isnan(data[9, 4]) and np.isnan(data).sum() == 1
    assert np.isnan(y.amaxes).any()
