"""The casts of the reference agree with the library's, which they do not use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8
from loka_jax.fp8 import E4M3, E5M2
from loka_jax.measure.check_casts import Rounding, operand, round_to, scale_inv_of
from loka_jax.recipe import Cast
from tests import support

both_formats = pytest.mark.parametrize("dtype", [E4M3, E5M2])


@both_formats
def test_every_code_and_what_lies_between_is_rounded_as_by_ml_dtypes(dtype):
    codes = jnp.arange(256, dtype=jnp.uint8)
    values = np.sort(np.asarray(jax.lax.bitcast_convert_type(codes, dtype), np.float32))
    values = values[np.isfinite(values)]
    between = [values[:-1] * (1 - t) + values[1:] * t for t in (0.25, 0.5, 0.75)]
    beyond = values[[0, -1]] * 1.5
    x = np.concatenate([values, *between, beyond])
    expected = np.asarray(fp8.saturate(jnp.asarray(x), dtype), np.float32)
    np.testing.assert_array_equal(round_to(jnp.asarray(x), dtype), expected)


def test_nan_stays_nan():
    assert np.isnan(round_to(jnp.float32(np.nan), E4M3))


@both_formats
def test_scales_are_the_least_powers_of_two_that_hold_the_amax(dtype):
    amax = jnp.asarray([1e-6, 0.3, 448.0, 449.0, 57344.0, 1e5], jnp.float32)
    expected = fp8.compute_scale_inv(amax, dtype)
    np.testing.assert_array_equal(scale_inv_of(amax, dtype), expected)


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_an_operand_is_cast_as_the_library_casts_it(granularity):
    x = support.uneven_rows(48, 160, decades=3)
    axes = (1,) if granularity == "rowwise" else None
    found = operand(x, Cast(granularity=granularity), "lhs", jnp.float32(1))
    np.testing.assert_array_equal(found.value, fp8.quantize(x, axes=axes).dequantize())


@pytest.mark.parametrize("name, tile", [("rhs", (128, 128)), ("lhs", (1, 128))])
def test_tiles_are_cast_as_the_library_casts_them(name, tile):
    x = support.uneven_rows(130, 160, decades=3)
    found = operand(x, Cast(granularity="blockwise"), name, jnp.float32(1))
    expected = fp8.quantize_tiles(x, tile=tile).dequantize()
    np.testing.assert_array_equal(found.value, expected)


def test_perturbations_are_spread_evenly_and_differ_by_seed():
    x = jnp.zeros((64, 64))
    first, second = (
        Rounding(jnp.uint32(seed), jnp.float32(1))(x, 0, jnp.ones_like(x))
        for seed in (1, 2)
    )
    # 4,096 uniform draws: the mean is off by 0.009, the mean square by 0.005.
    assert abs(float(jnp.mean(first))) < 0.05
    assert abs(float(jnp.mean(first**2)) - 1 / 3) < 0.03
    assert abs(float(jnp.mean(first * second))) < 0.03
    assert float(jnp.max(jnp.abs(first))) <= 1
