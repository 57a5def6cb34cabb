"""FP8 arrays: casts, scales, amaxes, and tiles."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8
from loka_jax.recipe import Cast
from tests import support

both_formats = pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
F32_MAX = float(np.finfo(np.float32).max)


def bits(x):
    """Returns the bytes of an FP8 array, every NaN as the same one."""
    x = np.asarray(x)
    return np.where(np.isnan(x.astype(np.float32)), 0xFF, x.view(np.uint8))


@both_formats
def test_a_cast_is_that_of_ml_dtypes_after_clipping_and_keeps_nan(dtype):
    limit = {fp8.E4M3: 448.0, fp8.E5M2: 57344.0}[dtype]
    assert fp8.fp8_max(dtype) == limit
    own = np.arange(256, dtype=np.uint8).view(np.dtype(dtype)).astype(np.float32)
    many = support.normal(4096) * 10.0 ** np.linspace(-9, 6, 4096, dtype=np.float32)
    beyond = [limit, limit * 1.03, 465.0, 61440.0, 1e30, np.inf]
    x = np.concatenate([own, many, beyond, np.negative(beyond)]).astype(np.float32)
    wide, narrow = x, jnp.asarray(x).astype(jnp.bfloat16)
    found = jax.jit(lambda *xs: [fp8.saturate(x, dtype) for x in xs])(wide, narrow)
    for x, y in zip((wide, narrow), found, strict=True):
        clipped = np.clip(np.asarray(x).astype(np.float32), -limit, limit)
        np.testing.assert_array_equal(bits(y), bits(clipped.astype(dtype)))
    finite = np.isfinite(own)
    np.testing.assert_array_equal(np.float32(found[0])[:256][finite], own[finite])


@both_formats
def test_scales_are_the_largest_that_keep_amax_in_range(dtype):
    limit = fp8.fp8_max(dtype)
    # Also exactly where a power of two takes amax to the limit, and just beyond.
    edges = limit * np.exp2(np.arange(-20.0, 20)).astype(np.float32)
    amax = 10.0 ** np.linspace(-30, 30, 999, dtype=np.float32)
    amax = np.concatenate([amax, edges, np.nextafter(edges, np.float32(np.inf))])
    scale_inv = functools.partial(fp8.compute_scale_inv, dtype=dtype)

    @jax.jit
    def scales(amax):
        exact = scale_inv(amax, pow2_scale=False)
        faults = scale_inv(jnp.float32([jnp.inf, jnp.nan, 0.0, 1e-45]))
        return scale_inv(amax), scale_inv(amax, margin=2), exact, faults

    found, with_margin, exact, faults = map(np.float64, scales(amax))
    expected = np.exp2(-np.floor(np.log2(limit / amax.astype(np.float64))))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(with_margin, 4 * expected)
    np.testing.assert_allclose(amax / exact, limit, rtol=3e-7)
    np.testing.assert_array_equal(np.isnan(faults), [True, True, False, False])
    assert np.all(faults[2:] >= np.finfo(np.float32).tiny)  # normal, so not flushed


def test_amaxes_are_those_of_all_elements_of_slices_or_of_devices():
    x = np.asarray(support.normal(4096, 3))
    found = jax.jit(lambda x: (fp8.amax(x), jnp.max(fp8.amax_of_parts(x))))(x)
    np.testing.assert_array_equal(found, [np.abs(x).max()] * 2)
    np.testing.assert_array_equal(fp8.amax(x, (1,)), np.abs(x).max(1, keepdims=True))
    assert fp8.amax(x[:0]) == 0
    over = jax.vmap(lambda x: fp8.amax_over_devices(x, ("d",)), axis_name="d")
    x = jnp.float32([[1, jnp.nan, 5], [4, 2, 3]])
    np.testing.assert_array_equal(over(x), [[4, jnp.nan, 5]] * 2)
    np.testing.assert_array_equal(fp8.amax_over_devices(x, ()), x)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_an_amax_never_loses_a_non_finite_element(bad):
    # XLA's own maximum loses a NaN in wide float32 reductions on CPUs.
    dtypes = jnp.float32, jnp.bfloat16, jnp.float16
    shapes = (1,), (4096,), (128, 512)
    xs = [np.ones(shape, dtype) for shape in shapes for dtype in dtypes]
    for x in xs:
        x.flat[0] = bad
    amaxes = jax.jit(
        lambda xs: [(fp8.amax(x), fp8.amax(fp8.amax_of_parts(x))) for x in xs]
    )(xs)
    chex.assert_trees_all_equal(amaxes, [(abs(jnp.float32(bad)),) * 2] * len(xs))


@both_formats
def test_rows_keep_their_precision_whatever_their_size(dtype):
    sizes = np.float32([0.0, 1e-45, 1e-40, 1e-37, 1e-23, 3e38, F32_MAX])
    extreme = np.outer(sizes, [0.0, 1.0, -1.0] + [0.0] * 1021)
    uneven = np.asarray(support.uneven_rows(64, 1024))
    bad = np.ones((3, 1024))
    bad[0, 1], bad[1, 5] = np.nan, np.inf
    x = np.concatenate([uneven, extreme, bad]).astype(np.float32)

    @jax.jit
    def rowwise(x):
        y = fp8.quantize(x, dtype, axes=(1,))
        return y, y.dequantize()

    y, wide = rowwise(x)
    chex.assert_shape(y.scale_inv, (len(x), 1))
    floor = support.FLOOR_DB["cast_e4m3" if dtype is fp8.E4M3 else "cast_e5m2"]
    assert support.sqnr_db(uneven, wide[:64], axis=1).min() > floor
    values = np.asarray(y.data, np.float32)[64:71], y.scale_inv[64:71]
    chex.assert_tree_all_finite(values)
    np.testing.assert_array_equal(wide[64], 0)
    # A fault is seen in all that share its scale, and nowhere else.
    assert np.isnan(wide[-3:-1]).all() and np.all(wide[-1] == 1)


@pytest.mark.parametrize(
    "dtype, shape, tile",
    [
        (fp8.E4M3, (130, 257), (128, 128)),
        (fp8.E5M2, (5, 257), (1, 128)),
        (fp8.E4M3, (0, 8), (128, 128)),
    ],
)
def test_tiles_are_each_cast_by_their_own_scale(dtype, shape, tile):
    x = support.normal(*shape) * 10.0 ** support.normal(*shape, seed=1)
    (m, k), (rows, cols) = shape, tile

    @jax.jit
    def tiled(x):
        y = fp8.quantize_tiles(x, dtype, tile=tile)
        return y, y.dequantize()

    y, wide = tiled(x)
    assert y.tile == tile
    chex.assert_shape(y.scale_inv, (-(-m // rows), -(-k // cols)))
    expected = support.cast_tiles_exactly(x, np.dtype(dtype), tile)
    chex.assert_trees_all_equal(wide, expected.astype(np.float32))


@both_formats
def test_blocks_are_those_of_the_mx_specification(dtype):
    """Elements and E8M0 scales, bit for bit (OCP MX v1.0, 5.3 and 6.3)."""
    emax = {fp8.E4M3: 8, fp8.E5M2: 15}[dtype]
    exponents = np.arange(-117 + emax, 128)
    draws = np.random.default_rng(0)
    x = draws.standard_normal((len(exponents), 64)).astype(np.float32)
    x /= np.abs(x).max(axis=1, keepdims=True)
    x[:, 3] = np.float32(draws.uniform(1, 2, len(exponents)))  # the largest one
    x = np.ldexp(x, exponents[:, None]).astype(np.float32)
    x = np.concatenate([x, np.zeros((1, 64), np.float32), x[:1]])
    x[-1, [0, 40]] = np.nan, np.inf
    cast = Cast(dtype=dtype, granularity="mx")
    y = jax.jit(lambda x: cast.in_tiles(x, "rhs"))(x)
    assert y.tile == (1, 32) and y.scale_inv.shape == (len(x), 2)
    scales = np.asarray(y.scale_inv.astype(jnp.float8_e8m0fnu)).view(np.uint8)
    np.testing.assert_array_equal(scales[:-2, 0], exponents - emax + 127)
    assert set(scales[-1]) == {255}
    blocks = x[:-2, :32].astype(np.float64)
    exact = blocks * 2.0 ** (emax - exponents[:, None])
    limit = fp8.fp8_max(dtype)
    assert (np.abs(exact) > limit).any()  # some saturate
    expected = np.clip(exact, -limit, limit).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(bits(y.data[:-2, :32]), bits(expected))
    np.testing.assert_array_equal(np.asarray(y.data[-2], np.float32), 0)


def test_matrices_are_padded_with_zeros_to_multiples_of_16():
    assert [fp8.padded_size(n) for n in (0, 1, 16, 17, 48)] == [0, 16, 16, 32, 48]
    x = np.arange(1.0, 103, dtype=np.float32).reshape(17, 6)
    np.testing.assert_array_equal(fp8.pad(x), np.pad(x, ((0, 15), (0, 10))))
    assert fp8.pad_to(x, (17, 6)) is x
