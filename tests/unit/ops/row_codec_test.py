"""Rows on the wire: how many bytes, how exact, and nothing that hides a fault."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import row_codec
from loka_jax.ops.row_codec import CODECS
from tests import support

# Of a row's largest value: half a step of the coarsest scale, a power of two.
ERRORS = {"f32": 0.0, "bf16": 2.0**-8, "e4m3": 2.0**-4, "int8": 1 / 127}


def there_and_back(rows, codec):
    return row_codec.decode(row_codec.encode(rows, codec), codec, rows.shape[-1])


@pytest.mark.parametrize("codec", CODECS)
def test_every_row_keeps_its_precision(codec):
    rows = support.uneven_rows(64, 16, decades=6)
    back = np.asarray(there_and_back(rows, codec), np.float64)
    error = np.abs(back - np.asarray(rows)).max(axis=1)
    amax = np.abs(np.asarray(rows)).max(axis=1)
    assert np.all(error <= ERRORS[codec] * amax)


@pytest.mark.parametrize("codec", CODECS)
def test_what_came_back_once_comes_back_unchanged(codec):
    rows = there_and_back(support.uneven_rows(64, 16, decades=6), codec)
    np.testing.assert_array_equal(there_and_back(rows, codec), rows)


@pytest.mark.parametrize("codec", CODECS)
def test_payloads_have_the_bytes_that_are_named(codec):
    payload = row_codec.encode(jnp.ones((3, 16)), codec)
    assert payload.nbytes == 3 * row_codec.row_bytes(codec, 16)
    narrow = {"f32": jnp.float32, "bf16": jnp.uint16}
    assert payload.dtype == narrow.get(codec, jnp.uint8)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_stay_so_and_alone(codec, value):
    rows = jnp.ones((3, 8)).at[1, 2].set(value)
    is_finite = jnp.isfinite(there_and_back(rows, codec))
    assert not is_finite[1].all()
    assert is_finite[0].all() and is_finite[2].all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 3e38])
def test_extreme_values_stay_finite(codec, size):
    back = there_and_back(jnp.array([[size, -size, 0.0]], jnp.float32), codec)
    assert jnp.isfinite(back).all()
    # What bfloat16 has no normal number for may become zero.
    np.testing.assert_allclose(
        np.asarray(back, np.float64)[0, 0], size, rtol=2.0**-4, atol=1e-37
    )


def test_zeros_stay_zero():
    for codec in CODECS:
        back = jax.jit(there_and_back, static_argnums=1)(jnp.zeros((2, 4)), codec)
        np.testing.assert_array_equal(np.asarray(back, np.float32), 0)
