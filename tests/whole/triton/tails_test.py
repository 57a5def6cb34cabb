"""Tails of wide products by Triton against XLA's, interpreted and on a GPU."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, xla
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.normed import (
    NO_VECTORS,
    Epilogue,
    NormResiduals,
    NormVectors,
    xhat_scale_inv,
)
from loka_jax.tails import Forms, Outer, Scale, Scaled, Written
from loka_jax.triton import cross_gradient, cross_tail, joined_cast, norm_tail, tail
from tests import support
from tests.support.triton import compiled, interpreted, on_gpu, spilled_bytes

__all__ = ["interpreted", "on_gpu"]

ALL = Forms(fp8=E4M3, transposed=True, amax=True)
GRADIENT = Forms(bf16=False, fp8=E5M2, transposed=True, amax=True)
# Of one tile, of several, and of tiles that are not full.
SHAPES = [(32, 32), (64, 96), (48, 80)]
# Of several scales in one vector; the others would make numbers NaN.
SCALE_INV = Scale(jnp.asarray([jnp.nan, jnp.nan, 2.0**-4, jnp.nan], jnp.float32), 2)
CROSS_CONFIG = tail.TuningConfig(32, 32, 1)


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def anywhere(request):
    """Runs a test interpreted and on a GPU."""
    request.getfixturevalue(request.param)


anywhere_ = pytest.mark.usefixtures("anywhere")
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _normal(shape, seed, dtype=jnp.bfloat16):
    return support.normal(*shape, seed=seed, dtype=dtype)


def _product(shape, seed):
    """Returns a product of which two scales were not applied."""
    vector = jnp.asarray([jnp.nan, 0.25, 4.0], jnp.float32)
    return Scaled(_normal(shape, seed), (Scale(vector, 1), Scale(vector, 2)), unit=0.5)


def _fp8(shape, seed):
    x = fp8.quantize(_normal(shape, seed))
    return Scaled(x.data, (Scale.of(x.scale_inv),))


def _assert_same(ours, theirs):
    """Asserts that results agree but for roundings of nearly equal float32 values."""
    assert jax.tree.structure(_whole(ours)) == jax.tree.structure(_whole(theirs))
    pairs = zip(
        jax.tree.leaves(_whole(ours)), jax.tree.leaves(_whole(theirs)), strict=True
    )
    for x, y in pairs:
        assert x.shape == y.shape and x.dtype == y.dtype
        # One step of the format, and the float32 error of values that cancel.
        step = float(jnp.finfo(y.dtype).eps) if y.dtype != jnp.float32 else 1e-5
        x, y = (np.asarray(v, np.float64) for v in (x, y))
        np.testing.assert_array_less(
            np.abs(x - y), step * np.abs(y) + 2e-2 * step + 1e-5
        )
        assert np.mean(x == y) > 0.97 or step == 1e-5


def _whole(results):
    """Returns the results with one amax in place of those of parts."""

    def reduced(x):
        if not isinstance(x, Written) or x.amaxes is None:
            return x
        return x._replace(amaxes=jnp.max(x.amaxes))

    return jax.tree.map(reduced, results, is_leaf=lambda x: isinstance(x, Written))


@anywhere_
@shapes
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("is_backward", [True, False])
def test_cross_tails_are_those_of_xla(shape, count, is_fp8, is_backward):
    make = _fp8 if is_fp8 else _product
    summands, x0 = [make(shape, i) for i in range(count)], make(shape, 3)
    bias = None if is_backward else support.normal(shape[1], seed=4)
    want = GRADIENT if is_backward else ALL
    options = dict(want=want, y_scale_inv=SCALE_INV, keep_s=count == 3)
    options["has_row_sum"] = is_backward
    args = summands, x0, bias
    ours = cross_tail.cross_tail(*args, **options, config=CROSS_CONFIG)
    theirs = xla.cross_tail(*args, **options)
    if is_backward:  # a sum over rows, in another order
        np.testing.assert_allclose(ours.row_sum, theirs.row_sum, rtol=1e-5, atol=1e-4)
    _assert_same(ours._replace(row_sum=None), theirs._replace(row_sum=None))


def _outer(shape, seed):
    column, row = (support.normal(size, seed=seed + i) for i, size in enumerate(shape))
    return Outer(column, row)


def _assert_same_sums(ours, theirs):
    """Asserts that sums of float32 agree but for their order."""
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-4)


@anywhere_
@pytest.mark.parametrize("shape", [*SHAPES, (47, 79)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_fp8", [True, False])
def test_tails_before_a_head_leave_its_dots_alone(shape, count, is_fp8):
    make = _fp8 if is_fp8 else _product
    summands, x0 = [make(shape, i) for i in range(count)], make(shape, 3)
    bias, head = (support.normal(shape[1], seed=seed) for seed in (4, 5))
    args = summands, x0, bias, head
    want = Forms(bf16=False)
    ours = cross_tail.cross_tail(*args, want=want, config=CROSS_CONFIG)
    theirs = xla.cross_tail(*args, want=want)
    assert theirs.y == Written(None, None, None)
    _assert_same_sums(ours.dots, theirs.dots)
    assert ours._replace(dots=None) == theirs._replace(dots=None)


@anywhere_
@pytest.mark.parametrize("shape", [*SHAPES, (47, 79)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_tails_behind_a_head_are_those_of_xla(shape, count):
    summands = [_outer(shape, 20), *(_fp8(shape, i) for i in range(count))]
    options = dict(want=GRADIENT, y_scale_inv=SCALE_INV, has_row_sum=True)
    args = summands, _fp8(shape, 3)
    ours = cross_tail.cross_tail(*args, **options, config=CROSS_CONFIG)
    theirs = xla.cross_tail(*args, **options)
    _assert_same_sums(ours.row_sum, theirs.row_sum)
    _assert_same(ours._replace(row_sum=None), theirs._replace(row_sum=None))


@anywhere_
@pytest.mark.parametrize(
    "widths, zeros",
    [((16, 32), 0), ((48, 32), 0), ((64, 112), 0), ((13, 70), 13), ((64, 13), 3)],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_joined_casts_are_those_of_xla(widths, zeros, dtype):
    parts = [_normal((48, n), i, dtype) for i, n in enumerate(widths)]
    want = dataclasses.replace(ALL, shape=(48, sum(widths) + zeros))
    options = dict(want=want, scale_inv=SCALE_INV)
    ours = joined_cast.joined_cast(*parts, **options, config=CROSS_CONFIG)
    _assert_same(ours, xla.joined_cast(*parts, **options))


@anywhere_
@pytest.mark.parametrize("shape", [(64, 96), (47, 79)], ids=str)
@pytest.mark.parametrize(
    "depth, start, zeros", [(1, 0, 0), (2, 13, 5), (2, 64, 5), (3, 16, 0)]
)
@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
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
    args = all_d, all_z, biases, other, x0
    options = dict(parts=parts, shape=shape)
    ours = cross_gradient.cross_gradient(*args, **options, config=CROSS_CONFIG)
    theirs = xla.cross_gradient(*args, **options)
    assert [x.shape for x in theirs.x0] == [part.shape for part in parts]
    _assert_same(ours.x0, theirs.x0)
    if has_head:
        return _assert_same_sums(ours.head, theirs.head)
    assert ours.head is theirs.head is None


def test_gradients_of_deep_networks_are_refused():
    z = Scaled(jnp.zeros((16, 16), jnp.bfloat16))
    with pytest.raises(ValueError, match="4 layers of 3"):
        cross_gradient.cross_gradient(
            *([z] * 5, [z] * 4, [None] * 4), parts=(), shape=(16, 16)
        )


# Rows and columns, and those of operands that were padded.
ODD = [((47, 79), (48, 80)), ((33, 257), (48, 272))]
odd = pytest.mark.parametrize("shape, padded", ODD, ids=str)


def _odd(want, shape):
    return dataclasses.replace(want, shape=shape, padded=True)


def _cut(x, shape):
    """Returns what stands in an operand before its padding."""
    return x.replace(data=x.data[: shape[0], : shape[1]])


def _vectors(norm, n):
    """Returns a bias, and gamma and beta of a norm of whole rows."""
    bias, gamma, beta = (support.normal(n, seed=seed) for seed in (3, 6, 7))
    if norm not in OF_ROWS:
        return NormVectors(bias)
    return NormVectors(bias, 1 + gamma / 4, beta if norm == "layer" else None)


def _assert_same_gradients(ours, theirs):
    # Sums over rows, in another order.
    chex.assert_trees_all_close(ours.vectors, theirs.vectors, rtol=1e-5, atol=2e-4)
    _assert_same(ours.dz, theirs.dz)


def _assert_padded(results, shape):
    """Asserts that matrices are padded with zeros, and returns them without these."""
    rows, columns = shape

    def unpadded(x):
        if x.ndim != 2:
            return x
        m, n = shape if x.shape[0] - rows in range(16) else (columns, rows)
        assert x.shape == (m + -m % 16, n + -n % 16)
        rest = np.asarray(x, np.float32)
        rest[:m, :n] = 0
        assert not rest.any()
        return x[:m, :n]

    return jax.tree.map(unpadded, results)


@anywhere_
@odd
@pytest.mark.parametrize("is_cut", [True, False])
def test_odd_cross_tails_are_padded_with_zeros(shape, padded, is_cut):
    summands = [_cut(_product(padded, i), shape) for i in range(2)]
    x0 = _cut(_fp8(padded, 3), shape)
    args = summands, x0, support.normal(shape[1], seed=4)
    options = dict(y_scale_inv=SCALE_INV, keep_s=True, has_row_sum=True)
    exact = xla.cross_tail(*args, **options, want=ALL)
    options["want"] = _odd(ALL, shape)
    if not is_cut:  # their padding is zeros, too
        pad = lambda x: x.replace(data=fp8.pad(x.data))  # noqa: E731
        args = [pad(x) for x in summands], pad(x0), args[2]
    ours = cross_tail.cross_tail(*args, **options, config=CROSS_CONFIG)
    theirs = xla.cross_tail(*args, **options)
    np.testing.assert_allclose(ours.row_sum, theirs.row_sum, rtol=1e-5, atol=1e-4)
    ours, theirs, exact = (x._replace(row_sum=None) for x in (ours, theirs, exact))
    _assert_same(ours, theirs)
    _assert_same(_assert_padded(_whole(theirs), shape), _whole(exact))


@anywhere_
def test_odd_joined_casts_are_padded_with_zeros():
    shape, parts = (47, 79), [_normal((47, 31), 0), _normal((47, 48), 1)]
    options = dict(want=_odd(ALL, shape), scale_inv=SCALE_INV)
    ours = joined_cast.joined_cast(*parts, **options, config=CROSS_CONFIG)
    _assert_same(ours, xla.joined_cast(*parts, **options))
    exact = xla.joined_cast(*parts, want=ALL, scale_inv=SCALE_INV)
    _assert_same(_assert_padded(_whole(ours), shape), _whole(exact))


@anywhere_
@odd
@pytest.mark.parametrize(
    "norm, activation",
    [
        ("block", "swish"),
        ("none", "gelu"),
        ("none", "relu"),
        ("layer", "hard_swish"),
        ("rms", "swish"),
    ],
)
def test_no_norm_sees_the_padding_of_odd_tails(shape, padded, norm, activation):
    epilogue = Epilogue(norm, activation)
    z, vectors = _cut(_product(padded, 0), shape), _vectors(norm, shape[1])
    options = dict(epilogue=epilogue, y_scale_inv=SCALE_INV)
    exact = xla.norm_tail(z, None, vectors, **options, want=ALL)
    options["want"] = _odd(ALL, shape)
    z = z.replace(data=fp8.pad(z.data))
    ours = norm_tail.norm_tail(z, None, vectors, **options)
    theirs = xla.norm_tail(z, None, vectors, **options)
    _assert_same(ours, theirs)
    assert exact.residuals is not None and theirs.residuals is not None
    kept = theirs.residuals
    _assert_same(
        _assert_padded((_whole(theirs.y), kept.xhat), shape),
        (_whole(exact.y), exact.residuals.xhat),
    )
    # The gradient of the last activations comes without padding.
    d, options = _cut(_product(padded, 4), shape), dict(epilogue=epilogue)
    options.update(dz_scale_inv=SCALE_INV)
    args = d, None, exact.residuals, vectors
    exact = xla.norm_tail_backward(*args, **options, want=GRADIENT)
    options["want"] = _odd(GRADIENT, shape)
    args = d, None, kept, vectors
    ours = norm_tail.norm_tail_backward(*args, **options)
    theirs = xla.norm_tail_backward(*args, **options)
    _assert_same_gradients(ours, theirs)
    _assert_same_gradients(theirs._replace(dz=exact.dz), exact)
    _assert_same(_assert_padded(_whole(theirs.dz), shape), _whole(exact.dz))


@anywhere_
@pytest.mark.parametrize("want", [ALL, Forms()], ids=["fp8", "bf16"])
def test_long_rows_keep_their_loudest_element_in_fp8(want):
    shape, epilogue = (40, 1200), Epilogue("rms")
    z = _normal(shape, 0).at[:, 7].set(1000)  # almost the root of 1,200 of xhat
    scale_inv = None if want.fp8 is None else SCALE_INV
    options = dict(epilogue=epilogue, want=want, y_scale_inv=scale_inv)
    ours = norm_tail.norm_tail(Scaled(z), **options)
    theirs = xla.norm_tail(Scaled(z), **options)
    _assert_same(ours, theirs)
    kept = theirs.residuals
    assert kept is not None and kept.xhat.dtype == E4M3
    xhat = kept.xhat.astype(jnp.float32) * xhat_scale_inv("rms", shape[1])
    np.testing.assert_allclose(xhat[:, 7], math.sqrt(shape[1]), rtol=2.0**-4)
    options = dict(epilogue=epilogue, want=want, dz_scale_inv=scale_inv)
    args = Scaled(_normal(shape, 1)), None, kept
    ours = norm_tail.norm_tail_backward(*args, **options)
    _assert_same_gradients(ours, xla.norm_tail_backward(*args, **options))


OF_ROWS = ("layer", "rms")
NORM_SHAPES = [(64, 512), (48, 80), (32, 336)]


@anywhere_
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize(
    "norm, activation",
    [
        ("block", "hard_swish"),
        ("block", "swish"),
        ("block", "none"),
        ("none", "relu"),
        ("none", "gelu"),
        ("layer", "swish"),
        ("layer", "none"),
        ("rms", "relu"),
    ],
)
def test_norm_tails_are_those_of_xla(shape, norm, activation):
    epilogue = Epilogue(norm, activation)
    vectors = _vectors(norm, shape[1])
    args = _product(shape, 0), _normal(shape, 1), vectors
    options = dict(epilogue=epilogue, want=ALL, y_scale_inv=SCALE_INV)
    ours = norm_tail.norm_tail(*args, **options)
    theirs = xla.norm_tail(*args, **options)
    _assert_same(ours, theirs)
    args = _product(shape, 4), _normal(shape, 5), theirs.residuals
    options = dict(epilogue=epilogue, want=GRADIENT, dz_scale_inv=SCALE_INV)
    ours = norm_tail.norm_tail_backward(*args, vectors, **options)
    theirs = xla.norm_tail_backward(*args, vectors, **options)
    _assert_same_gradients(ours, theirs)
    if norm not in OF_ROWS:
        assert xla.norm_tail_backward(*args, **options).vectors == NO_VECTORS
        assert norm_tail.norm_tail_backward(*args, **options).vectors == NO_VECTORS


@anywhere_
@pytest.mark.parametrize(
    "norm, dtype",
    [("block", jnp.bfloat16), ("none", E4M3), ("layer", jnp.bfloat16)],
)
def test_what_is_kept_for_backward_may_have_either_dtype(norm, dtype):
    shape, epilogue = (48, 336), Epilogue(norm, "relu")
    z, options = _product(shape, 0), dict(want=ALL, y_scale_inv=SCALE_INV)
    ours = norm_tail.norm_tail(z, epilogue=epilogue, xhat=dtype, **options)
    theirs = xla.norm_tail(z, epilogue=epilogue, xhat=dtype, **options)
    _assert_same(ours, theirs)
    assert theirs.residuals is not None
    assert theirs.residuals.xhat.dtype == jnp.bfloat16
    # Without a norm relu's backward pass may read the activations in FP8 instead.
    kept = theirs.residuals
    if norm == "none":
        assert theirs.y.fp8 is not None
        kept = NormResiduals(theirs.y.fp8.data, None)
    args = _product(shape, 4), None, kept
    options = dict(epilogue=epilogue, want=Forms())
    ours = norm_tail.norm_tail_backward(*args, **options)
    _assert_same(ours, xla.norm_tail_backward(*args, **options))


@anywhere_
def test_a_float32_weight_is_cast_in_one_pass():
    kernel = Scaled(support.normal(48, 80))
    options = dict(epilogue=Epilogue("none"), want=ALL, y_scale_inv=SCALE_INV)
    ours = norm_tail.norm_tail(kernel, xhat=None, **options)
    _assert_same(ours, xla.norm_tail(kernel, xhat=None, **options))


@anywhere_
def test_values_beyond_the_scale_saturate_and_nan_stays():
    zeros = jnp.zeros((32, 32), jnp.bfloat16)
    x = zeros.at[3, 5].set(1e6).at[7, 2].set(-1e6).at[9, 4].set(jnp.nan)
    x = x.at[11, 1].set(jnp.inf)
    ones = jnp.ones_like(zeros)
    options = dict(want=ALL, y_scale_inv=SCALE_INV, config=CROSS_CONFIG)
    y = cross_tail.cross_tail([Scaled(x)], Scaled(ones), **options).y
    assert y.fp8 is not None and y.fp8.data_t is not None and y.amaxes is not None
    data = np.asarray(y.fp8.data, np.float32)
    np.testing.assert_array_equal(data.T, np.asarray(y.fp8.data_t, np.float32))
    assert (data[3, 5], data[7, 2], data[11, 1]) == (448.0, -448.0, 448.0)
    assert np.isnan(data[9, 4]) and np.isnan(data).sum() == 1
    assert np.isnan(y.amaxes).any()


FORMS = [Forms(), Forms(bf16=False, fp8=E4M3), Forms(fp8=E4M3, transposed=True)]


@anywhere_
@pytest.mark.parametrize("want", FORMS, ids=str)
def test_only_the_requested_forms_are_returned(want):
    args = [_product((32, 32), 0)], _fp8((32, 32), 1)
    scale_inv = None if want.fp8 is None else SCALE_INV
    options = dict(want=want, y_scale_inv=scale_inv)
    ours = cross_tail.cross_tail(*args, **options, config=CROSS_CONFIG)
    _assert_same(ours, xla.cross_tail(*args, **options))


@pytest.mark.parametrize(
    "sizes, dtype, reason",
    [
        ((16, 32), jnp.bfloat16, None),
        ((23, 31), jnp.bfloat16, None),
        ((16, 0), jnp.bfloat16, "n=0 is not positive"),
        ((16, 32), jnp.float16, "float16 is none of bfloat16"),
    ],
)
def test_refused_operands_have_a_reason(sizes, dtype, reason):
    z = Scaled(jnp.zeros(sizes, dtype))
    found = cross_tail.why_not(*sizes, z)
    assert found == reason or (reason and found.startswith(reason))
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
            cross_tail.cross_tail([z], z, want=Forms())


def test_too_many_summands_are_refused():
    z = Scaled(jnp.zeros((16, 16), jnp.bfloat16))
    with pytest.raises(ValueError, match="4 summands of 3"):
        cross_tail.cross_tail([z] * 4, z, want=Forms())


def test_gamma_of_a_block_norm_is_refused(monkeypatch):
    monkeypatch.setattr(tail, "require_triton", lambda: None)
    options = dict(epilogue=Epilogue("block"), want=Forms())
    z, vectors = _product((16, 32), 0), NormVectors(gamma=jnp.ones(32))
    with pytest.raises(ValueError, match="takes neither gamma nor beta"):
        norm_tail.norm_tail(z, None, vectors, **options)


def test_tiles_that_hold_no_block_of_a_norm_are_refused():
    assert norm_tail.why_not(64, 512, norm="layer") is None
    config = tail.TuningConfig(64, 128, 4)
    reason = "has tiles of 128 columns, not 256"
    assert norm_tail.why_not(64, 512, norm="block", config=config).endswith(reason)


def _types(m, n):
    """Returns the types of operands by name."""
    return dict(
        x=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        x8=jax.ShapeDtypeStruct((m, n), E4M3),
        bias=jax.ShapeDtypeStruct((n,), jnp.float32),
        scales=jax.ShapeDtypeStruct((12,), jnp.float32),
    )


def _scaled(data, scales):
    """Returns a product, of which two scales were not applied, or what was cast."""
    count = 2 if data.dtype == jnp.bfloat16 else 1
    return Scaled(data, (Scale(scales, 3), Scale(scales, 5))[:count])


def _forward(want, z, x0, bias, scales):
    options = dict(want=want, y_scale_inv=Scale(scales, 7))
    z, x0 = _scaled(z, scales), _scaled(x0, scales)
    return cross_tail.cross_tail([z] * 3, x0, bias, **options)


def _backward(want, d, x0, scales):
    options = dict(want=want, y_scale_inv=Scale(scales, 7), has_row_sum=True)
    d, x0 = _scaled(d, scales), _scaled(x0, scales)
    return cross_tail.cross_tail([d] * 3, x0, **options)


def _before_a_head(want, z, x0, bias, scales):
    z, x0 = _scaled(z, scales), _scaled(x0, scales)
    want = dataclasses.replace(want, bf16=False)
    return cross_tail.cross_tail([z] * 3, x0, bias, bias, want=want)


def _behind_a_head(want, d, x0, rows, bias, scales):
    options = dict(want=want, y_scale_inv=Scale(scales, 7), has_row_sum=True)
    d, x0 = _scaled(d, scales), _scaled(x0, scales)
    return cross_tail.cross_tail([Outer(rows, bias), d, d], x0, **options)


def _join(want, first, second, scales):
    options = dict(want=want, scale_inv=Scale(scales, 7))
    return joined_cast.joined_cast(first, second, **options)


def _split(want, d, z, bias, scales, *, widths):
    parts = [jax.ShapeDtypeStruct((want.shape[0], n), jnp.bfloat16) for n in widths]
    d, z = _scaled(d, scales), _scaled(z, scales)
    return cross_gradient.cross_gradient(
        *([z, z, d], [z] * 2, [bias] * 2, z), parts=parts, shape=want.shape
    )


def _split_behind_a_head(want, d, z, rows, bias, scales, *, widths):
    parts = [jax.ShapeDtypeStruct((want.shape[0], n), jnp.bfloat16) for n in widths]
    d, z = _scaled(d, scales), _scaled(z, scales)
    return cross_gradient.cross_gradient(
        *([z, z, Outer(rows, bias)], [z] * 2, [bias] * 2, z, d),
        parts=parts,
        shape=want.shape,
    )


CROSS_PROGRAMS = {
    "forward": (_forward, ALL, ("x8", "x8", "bias", "scales")),
    "forward of bf16": (_forward, ALL, ("x", "x", "bias", "scales")),
    "backward": (_backward, GRADIENT, ("x8", "x8", "scales")),
    "backward of bf16": (_backward, GRADIENT, ("x", "x8", "scales")),
    "before a head": (_before_a_head, Forms(), ("x8", "x8", "bias", "scales")),
    "behind a head": (_behind_a_head, GRADIENT, ("x8", "x8", "rows", "bias", "scales")),
    "join": (_join, ALL, ("first", "x", "scales")),
}


@pytest.mark.parametrize(
    "name, shape",
    [
        *((name, (65536, 3456)) for name in CROSS_PROGRAMS),
        ("forward", (65521, 3441)),
        ("backward", (65521, 3441)),
    ],
    ids=str,
)
def test_programs_of_cross_tails_for_hopper_do_not_spill(name, shape):
    function, want, reads = CROSS_PROGRAMS[name]
    # Padded operands of odd sizes are read and written 16 bytes at a time, too.
    want = dataclasses.replace(want, shape=shape, padded=True)
    types = _types(65536, 3456)
    types["bias"] = jax.ShapeDtypeStruct(shape[1:], jnp.float32)
    types["rows"] = jax.ShapeDtypeStruct(shape[:1], jnp.float32)
    types["first"] = jax.ShapeDtypeStruct((65536, 128), jnp.bfloat16)
    run = functools.partial(function, want)
    program = compiled(run, *(types[x] for x in reads))
    assert spilled_bytes(program.ptxas_report()) == 0
    wide = "ld.global.v4" if name == "before a head" else "st.global.v4"
    assert wide in program.ptx  # 16 bytes at a time
    assert "st.global.b8" not in program.ptx


def _norm(want, epilogue, z, x, scales, vectors=NO_VECTORS):
    options = dict(want=want, y_scale_inv=Scale(scales, 7), epilogue=epilogue)
    return norm_tail.norm_tail(_scaled(z, scales), x, vectors, **options)


def _norm_backward(want, epilogue, d, xhat, rstd, scales, vectors):
    residuals = NormResiduals(xhat, None if epilogue.norm == "none" else rstd)
    scale_inv = None if want.fp8 is None else Scale(scales, 7)
    options = dict(epilogue=epilogue, want=want, dz_scale_inv=scale_inv)
    d = _scaled(d, scales)
    return norm_tail.norm_tail_backward(d, None, residuals, vectors, **options)


def _assert_stores_16_bytes(program):
    assert spilled_bytes(program.ptxas_report()) == 0
    assert "st.global.v4" in program.ptx


@pytest.mark.parametrize("name", ["join", "split", "split behind a head"])
@pytest.mark.parametrize("widths", [(416, 13), (13, 416)], ids=str)
def test_programs_of_odd_parts_do_not_spill(name, widths):
    shape, types = (65536, 448), _types(65536, 448)
    want = dataclasses.replace(ALL, shape=shape, padded=True)
    types["rows"] = jax.ShapeDtypeStruct((65536,), jnp.float32)
    types["first"], types["second"] = (
        jax.ShapeDtypeStruct((65536, n), jnp.bfloat16) for n in widths
    )
    split = functools.partial(_split, widths=widths)
    behind_a_head = functools.partial(_split_behind_a_head, widths=widths)
    run, reads = {
        "join": (_join, ("first", "second", "scales")),
        "split": (split, ("x", "x8", "bias", "scales")),
        "split behind a head": (behind_a_head, ("x8", "x8", "rows", "bias", "scales")),
    }[name]
    program = compiled(functools.partial(run, want), *(types[x] for x in reads))
    assert spilled_bytes(program.ptxas_report()) == 0
    wide = "st.global.v4" if name == "join" else "ld.global.v4"
    assert wide in program.ptx  # 16 bytes at a time on the other side


@pytest.mark.parametrize(
    "norm, activation", [("block", "hard_swish"), ("none", "none")]
)
def test_programs_of_norm_tails_for_hopper_do_not_spill(norm, activation):
    types = _types(16384, 7680)
    run = functools.partial(_norm, ALL, Epilogue(norm, activation))
    _assert_stores_16_bytes(compiled(run, types["x"], types["x"], types["scales"]))


@pytest.mark.parametrize(
    "norm, activation", [("block", "hard_swish"), ("none", "relu")]
)
def test_programs_of_gradients_of_norm_tails_do_not_spill(norm, activation):
    types = _types(16384, 7680)
    run = functools.partial(_norm_backward, GRADIENT, Epilogue(norm, activation))
    rstd = jax.ShapeDtypeStruct((7680 // 256, 16384), jnp.float32)
    args = types["x"], types["x8"], rstd, types["scales"]
    _assert_stores_16_bytes(compiled(run, *args, NormVectors(types["bias"])))


@pytest.mark.parametrize("norm", OF_ROWS)
@pytest.mark.parametrize("shape", [(16384, 4096), (16369, 4081)], ids=str)
def test_programs_of_norms_of_whole_rows_do_not_spill(norm, shape):
    m, n = (size + -size % 16 for size in shape)
    types, epilogue = _types(m, n), Epilogue(norm, "swish")
    vector = jax.ShapeDtypeStruct(shape[1:], jnp.float32)
    vectors = NormVectors(gamma=vector, beta=vector if norm == "layer" else None)
    run = functools.partial(_norm, _odd(ALL, shape), epilogue)
    args = types["x"], None, types["scales"], vectors
    _assert_stores_16_bytes(compiled(run, *args))
    run = functools.partial(_norm_backward, _odd(GRADIENT, shape), epilogue)
    rstd = jax.ShapeDtypeStruct(shape[:1], jnp.float32)
    args = types["x"], types["x"], rstd, types["scales"], vectors
    _assert_stores_16_bytes(compiled(run, *args))


@pytest.mark.parametrize("shape", [(16384, 2048), (16369, 4593)], ids=str)
def test_programs_of_plain_norms_of_whole_rows_do_not_spill(shape):
    m, n = (size + -size % 16 for size in shape)
    types, epilogue = _types(m, n), Epilogue("rms")
    run = functools.partial(_norm, _odd(ALL, shape), epilogue)
    args = types["x"], None, types["scales"], NO_VECTORS
    _assert_stores_16_bytes(compiled(run, *args))
    run = functools.partial(_norm_backward, _odd(Forms(), shape), epilogue)
    rstd = jax.ShapeDtypeStruct(shape[:1], jnp.float32)
    args = types["x"], types["x8"], rstd, types["scales"], NO_VECTORS
    _assert_stores_16_bytes(compiled(run, *args))


def test_the_program_that_casts_a_weight_does_not_spill():
    kernel = jax.ShapeDtypeStruct((18432, 8192), jnp.float32)
    scales = jax.ShapeDtypeStruct((12,), jnp.float32)

    def cast(kernel, scales):
        options = dict(epilogue=Epilogue("none"), want=ALL, xhat=None)
        scale_inv = Scale(scales, 7)
        return norm_tail.norm_tail(Scaled(kernel), y_scale_inv=scale_inv, **options).y

    _assert_stores_16_bytes(compiled(cast, kernel, scales))
