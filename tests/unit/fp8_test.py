import chex
import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8
from tests import support

both_formats = pytest.mark.parametrize("dtype", [fp8.E4M3, fp8.E5M2])
F32_MAX = float(np.finfo(np.float32).max)


def bits(x):
    """Returns the bytes of an FP8 array, every NaN as the same one."""
    x = np.asarray(x)
    return np.where(np.isnan(x.astype(np.float32)), 0xFF, x.view(np.uint8))


def all_values(dtype):
    """Returns the 256 values of an FP8 format."""
    return np.arange(256, dtype=np.uint8).view(np.dtype(dtype))


# Casts.


@both_formats
def test_every_finite_fp8_value_survives_a_round_trip(dtype):
    values = all_values(dtype)
    values = values[np.isfinite(values.astype(np.float32))]
    again = fp8.saturate(jnp.asarray(values.astype(np.float32)), dtype)
    np.testing.assert_array_equal(bits(again), bits(values))


@both_formats
@pytest.mark.parametrize("source", [jnp.float32, jnp.bfloat16])
def test_cast_is_bitwise_that_of_ml_dtypes_after_clipping(dtype, source):
    x = support.normal(4096) * 10.0 ** jnp.linspace(-9, 6, 4096)
    x = x.astype(source)
    limit = fp8.fp8_max(dtype)
    expected = np.clip(np.asarray(x).astype(np.float32), -limit, limit).astype(dtype)
    np.testing.assert_array_equal(bits(fp8.saturate(x, dtype)), bits(expected))


@both_formats
@pytest.mark.parametrize("value", [465.0, 61440.0, 1e30, np.inf])
def test_values_out_of_range_saturate(dtype, value):
    limit = fp8.fp8_max(dtype)
    expected = min(value, limit) if value > limit else float(dtype(value))
    y = fp8.saturate(jnp.float32([value, -value]), dtype).astype(jnp.float32)
    chex.assert_trees_all_equal(y, jnp.float32([expected, -expected]))


@both_formats
def test_nan_stays_nan(dtype):
    assert jnp.isnan(fp8.saturate(jnp.float32([jnp.nan]), dtype).astype(jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.float8_e4m3fnuz])
def test_other_formats_are_refused(dtype):
    with pytest.raises(ValueError, match="must be E4M3 or E5M2"):
        fp8.quantize(jnp.ones(4), dtype)


# Scales.


@both_formats
def test_scale_maps_amax_into_the_upper_half_of_the_range(dtype):
    amax = 10.0 ** jnp.linspace(-30, 30, 999, dtype=jnp.float32)
    scaled = np.asarray(amax / fp8.compute_scale_inv(amax, dtype), np.float64)
    limit = fp8.fp8_max(dtype)
    assert np.all((limit / 2 < scaled) & (scaled <= limit))


@both_formats
def test_scales_are_powers_of_two(dtype):
    amax = 10.0 ** jnp.linspace(-36, 38, 999, dtype=jnp.float32)
    mantissa, _ = np.frexp(np.asarray(fp8.compute_scale_inv(amax, dtype)))
    np.testing.assert_array_equal(mantissa, 0.5)


def test_numbers_round_up_to_powers_of_two():
    x = 10.0 ** jnp.linspace(-36, 36, 999, dtype=jnp.float32)
    up = fp8.power_of_two_up(x)
    mantissa, _ = np.frexp(np.asarray(up))
    np.testing.assert_array_equal(mantissa, 0.5)
    assert jnp.all((x <= up) & (up < 2 * x))
    np.testing.assert_array_equal(fp8.power_of_two_up(up), up)


@both_formats
def test_without_pow2_scale_amax_maps_to_the_maximum(dtype):
    amax = jnp.float32([3.0, 1e-7, 5e20])
    scaled = amax / fp8.compute_scale_inv(amax, dtype, pow2_scale=False)
    chex.assert_trees_all_close(scaled, jnp.full(3, fp8.fp8_max(dtype)), rtol=3e-7)


def test_margin_leaves_bits_of_headroom():
    amax = jnp.float32([3.0, 1e-7, 3e38])
    bare = fp8.compute_scale_inv(amax, fp8.E4M3)
    chex.assert_trees_all_equal(
        fp8.compute_scale_inv(amax, fp8.E4M3, margin=2), 4 * bare
    )


@pytest.mark.parametrize("amax", [np.inf, np.nan])
def test_a_non_finite_amax_gives_a_nan_scale(amax):
    assert jnp.isnan(fp8.compute_scale_inv(jnp.float32(amax), fp8.E4M3))


@pytest.mark.parametrize("shape", [(7, 13), (64, 64), (4096, 3), (1,), (0, 4)])
def test_the_largest_amax_of_parts_is_the_amax(shape):
    x = support.normal(*shape)
    chex.assert_trees_all_equal(jnp.max(fp8.amax_of_parts(x)), fp8.amax(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(1,), (4096,), (128, 512)])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_an_amax_never_loses_a_non_finite_element(dtype, shape, bad):
    # XLA's own maximum loses a NaN in wide float32 reductions on CPUs.
    x = support.normal(*shape, dtype=dtype)
    x = x.at[(0,) * len(shape)].set(bad)
    amax = jax.jit(lambda x: (fp8.amax(x), fp8.amax(fp8.amax_of_parts(x))))
    chex.assert_trees_all_equal(amax(x), (abs(jnp.float32(bad)),) * 2)


# Arrays.


@both_formats
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37, 1e-23, 3e38, F32_MAX])
def test_extreme_values_stay_finite(dtype, size):
    y = fp8.quantize(jnp.array([0.0, size, -size], jnp.float32), dtype)
    chex.assert_tree_all_finite((y.data.astype(jnp.float32), y.scale_inv))


@both_formats
@pytest.mark.parametrize("axes", [None, (-1,)])
def test_zeros_stay_zero(dtype, axes):
    y = fp8.quantize(jnp.zeros((4, 8)), dtype, axes=axes)
    chex.assert_trees_all_equal(y.dequantize(), jnp.zeros((4, 8)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_element_is_seen_in_all_that_share_its_scale(bad):
    x = jnp.ones((2, 4)).at[0, 1].set(bad)
    y = fp8.quantize(x, axes=(1,)).dequantize()
    assert jnp.all(jnp.isnan(y[0])) and jnp.all(y[1] == 1)


@pytest.mark.parametrize(
    "dtype, name", [(fp8.E4M3, "cast_e4m3"), (fp8.E5M2, "cast_e5m2")]
)
@pytest.mark.parametrize("pow2_scale", [True, False])
def test_a_cast_keeps_its_sqnr(dtype, name, pow2_scale):
    x = support.normal(64, 1024)
    y = fp8.quantize(x, dtype, pow2_scale=pow2_scale).dequantize()
    assert support.sqnr_db(x, y) > support.FLOOR_DB[name]


@pytest.mark.parametrize(
    "dtype, name", [(fp8.E4M3, "cast_e4m3"), (fp8.E5M2, "cast_e5m2")]
)
def test_rowwise_every_row_keeps_its_precision(dtype, name):
    x = support.uneven_rows(64, 1024)
    y = fp8.quantize(x, dtype, axes=(1,))
    chex.assert_shape(y.scale_inv, (64, 1))
    worst = support.sqnr_db(x, y.dequantize(), axis=1).min()
    assert worst > support.FLOOR_DB[name]


def test_tensorwise_small_rows_lose_theirs():
    x = support.uneven_rows(64, 1024)
    y = fp8.quantize(x).dequantize()
    assert support.sqnr_db(x, y) > support.FLOOR_DB["cast_e4m3"]
    assert support.sqnr_db(x, y, axis=1).min() < 1


@both_formats
@pytest.mark.parametrize("shape", [(256, 128), (130, 257), (1, 5), (0, 8)])
@pytest.mark.parametrize("tile", [(128, 128), (1, 128)])
def test_tiles_are_each_cast_by_their_own_scale(dtype, shape, tile):
    x = support.normal(*shape) * 10.0 ** support.normal(*shape, seed=1)
    y = fp8.quantize_tiles(x, dtype, tile=tile)
    (m, k), (rows, cols) = shape, tile
    chex.assert_shape(y.scale_inv, (-(-m // rows), -(-k // cols)))
    expected = support.cast_tiles_exactly(x, np.dtype(dtype), tile)
    chex.assert_trees_all_equal(y.dequantize(), expected.astype(np.float32))


@both_formats
def test_power_of_two_scales_are_exact_in_bfloat16(dtype):
    x = support.normal(64, 64, dtype=jnp.bfloat16)
    y = fp8.quantize(x, dtype, axes=(1,))
    chex.assert_trees_all_equal(
        y.dequantize(jnp.bfloat16).astype(jnp.float32), y.dequantize()
    )


def test_an_fp8_array_is_a_pytree_that_passes_through_jit():
    y = fp8.quantize_tiles(support.normal(8, 8), tile=(4, 4))
    chex.assert_trees_all_equal(jax.jit(lambda a: a)(y), y)


# Properties.

float32s = st.floats(width=32, allow_nan=True, allow_infinity=True)
finite = st.floats(-(2.0**122), 2.0**122, width=32)
special = st.sampled_from(
    [0.0, -0.0, 1e-45, 1e-39, float(np.finfo(np.float32).tiny), F32_MAX, -F32_MAX]
)
shapes = st.sampled_from([(0,), (1,), (3,), (17,)])
# One compilation a shape and format; the time limit would count it.
settings = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
quantize = jax.jit(fp8.quantize, static_argnames=("dtype", "axes", "pow2_scale"))


def vectors(elements):
    return arrays.arrays(np.float32, shapes, elements=elements)


@both_formats
@settings
@hypothesis.given(vectors(special | float32s))
def test_finite_data_stay_finite_and_faults_stay_seen(dtype, x):
    data = np.asarray(quantize(jnp.asarray(x), dtype).data, np.float32)
    if np.isfinite(x).all():
        assert np.isfinite(data).all()
    else:
        assert np.isnan(data).all()


@both_formats
@settings
@hypothesis.given(vectors(finite), st.booleans())
def test_error_is_at_most_half_a_step_of_the_format(dtype, x, pow2_scale):
    y = quantize(jnp.asarray(x), dtype, pow2_scale=pow2_scale)
    relative = 2.0 ** -(jnp.finfo(dtype).nmant + 1)
    step = float(y.scale_inv) * float(jnp.finfo(dtype).smallest_subnormal)
    # XLA may read and write float32 denormals as zero, hence the last term.
    bound = relative * np.abs(x.astype(np.float64)) * (1 + 1e-6) + step / 2 + 2e-38
    error = np.abs(np.asarray(y.dequantize(), np.float64) - x)
    assert np.all(error <= bound), (error, bound)


@both_formats
@settings
@hypothesis.given(vectors(finite))
def test_casting_twice_changes_nothing(dtype, x):
    once = quantize(jnp.asarray(x), dtype).dequantize()
    chex.assert_trees_all_equal(quantize(once, dtype).dequantize(), once)


@both_formats
@settings
@hypothesis.given(st.floats(2.0**-100, 2.0**100, width=32), st.sampled_from([1, 4]))
def test_constants_keep_the_precision_of_the_format(dtype, value, size):
    x = jnp.full((size,), value, jnp.float32)
    relative = 2.0 ** -(jnp.finfo(dtype).nmant + 1)
    chex.assert_trees_all_close(
        quantize(x, dtype).dequantize(), x, rtol=relative * (1 + 1e-6)
    )
