import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import fp8, quality
from tests import support


def test_sqnr_of_a_tenth_of_noise_is_20_db():
    ref = support.normal(64, 64)
    assert quality.sqnr(ref, 1.1 * ref) == pytest.approx(20, abs=1e-3)


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e25])
def test_measures_do_not_depend_on_the_size_of_the_array(size):
    ref = size * support.normal(64, 64)
    assert quality.sqnr(ref, 1.1 * ref) == pytest.approx(20, abs=1e-3)
    assert quality.relative_l2(ref, 1.1 * ref) == pytest.approx(0.1, rel=1e-4)
    assert quality.mere(ref, 1.1 * ref) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("ref", [jnp.zeros((2, 3)), jnp.ones((2, 3))])
def test_equal_arrays_have_no_noise(ref):
    assert quality.sqnr(ref, ref) == jnp.inf
    assert quality.worst_slice_sqnr(ref, ref) == jnp.inf
    assert quality.relative_l2(ref, ref) == 0
    assert quality.mere(ref, ref) == 0


@pytest.mark.parametrize("shape", [(2, 3), (512, 8)])
def test_a_nan_is_seen_in_every_measure(shape):
    ref = jnp.ones(shape)
    bad = ref.at[0, 0].set(jnp.nan)
    for measure in (
        quality.sqnr,
        quality.worst_slice_sqnr,
        quality.relative_l2,
        quality.mere,
    ):
        assert jnp.isnan(measure(ref, bad)), measure


def test_worst_slice_sees_the_flushed_rows_that_sqnr_hides():
    ref = support.uneven_rows(256, 512)
    x = fp8.quantize(ref).dequantize()
    assert quality.sqnr(ref, x) > support.FLOOR_DB["cast_e4m3"]
    assert quality.worst_slice_sqnr(ref, x) == pytest.approx(0, abs=0.5)


def test_worst_slice_leaves_out_slices_of_zeros():
    ref = jnp.float32([[0, 0], [3, 4]])
    x = ref + jnp.float32([[1, 1], [0, 0.5]])
    assert quality.worst_slice_sqnr(ref, x) == pytest.approx(20, abs=1e-3)


def test_worst_slice_along_columns():
    ref = jnp.float32([[1, 10], [1, 10]])
    x = ref + jnp.float32([[0.1, 0.1], [0.1, 0.1]])
    assert quality.worst_slice_sqnr(ref, x, axis=0) == pytest.approx(20, abs=1e-3)


def test_mere_leaves_out_zeros_of_the_reference():
    ref, x = jnp.float32([0, 1, 2]), jnp.float32([5, 1.5, 2])
    assert quality.mere(ref, x) == 0.25


def test_underflow_rate_counts_nonzeros_that_became_zero():
    ref = jnp.float32([0, 1, 1e-9, 2])
    assert quality.underflow_rate(ref, fp8.quantize(ref).data) == np.float32(1 / 3)


def test_saturation_rate_counts_the_largest_magnitude():
    data = fp8.saturate(jnp.float32([1e9, -1e9, 1, 0]), fp8.E5M2)
    assert quality.saturation_rate(data) == 0.5


def test_bfloat16_arrays_are_measured_in_float32():
    ref = support.normal(64, 64, dtype=jnp.bfloat16)
    sqnr = quality.sqnr(ref, fp8.quantize(ref).dequantize(jnp.bfloat16))
    assert sqnr.dtype == jnp.float32
    assert sqnr > support.FLOOR_DB["cast_e4m3"]
