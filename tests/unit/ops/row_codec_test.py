"""Rows on the wire: how many bytes, how exact, and nothing that hides a fault."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import row_codec
from loka_jax.ops.row_codec import CODECS
from tests import support

# Of a row's largest value: half a step of the coarsest scale, a power of two.
ERRORS = {"f32": 0.0, "bf16": 2.0**-8, "e4m3": 2.0**-4, "int8": 1 / 127}
FAULTS = np.nan, np.inf, -np.inf
EXTREMES = 0.0, 1e-45, 1e-38, 3e38


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(rows, codec):
    """Returns the payload of a list of rows, and what it is decoded to."""
    payload = row_codec.encode(rows, codec)
    return payload, row_codec.decode(payload, codec, rows.shape[-1])


@pytest.mark.parametrize("codec", CODECS)
def test_rows_keep_their_precision_and_faults_stay_in_theirs(codec):
    uneven = np.asarray(support.uneven_rows(64, 16, decades=6))
    faulty = np.ones((3, 16), np.float32)
    faulty[range(3), range(3)] = FAULTS
    extreme = np.outer(np.float32(EXTREMES), [1, -1] + [0] * 14)
    rows = np.concatenate([uneven, faulty, extreme]).astype(np.float32)
    payload, back = there_and_back(rows, codec)
    assert payload.nbytes == len(rows) * row_codec.row_bytes(codec, 16)
    narrow = {"f32": jnp.float32, "bf16": jnp.uint16}
    assert payload.dtype == narrow.get(codec, jnp.uint8)
    assert back.dtype == (jnp.float32 if codec == "f32" else jnp.bfloat16)
    # What came back once comes back unchanged.
    again = np.asarray(there_and_back(back.astype(jnp.float32), codec)[1], np.float64)
    back = np.asarray(back, np.float64)
    np.testing.assert_array_equal(again[:64], back[:64])
    error, amax = (np.abs(x).max(axis=1) for x in (back[:64] - uneven, uneven))
    assert np.all(error <= ERRORS[codec] * amax)
    assert not np.isfinite(back[64:67]).all(axis=1).any()
    assert np.isfinite(back[67:]).all()
    # What bfloat16 has no normal number for may become zero.
    np.testing.assert_allclose(back[67:, 0], EXTREMES, rtol=2.0**-4, atol=1e-37)


def test_codes_of_8_bits_use_their_range():
    rows = jnp.float32([[127, -127, 1, 0], [254, 3, 0, 0], [0.5, 127.5, 0, 0]])
    payload, back = there_and_back(rows, "int8")
    codes = np.asarray(payload)[:12].view(np.int8).reshape(3, 4)
    # Under 1, 2 and 2; the scales' exponents follow the codes, rounded to even.
    np.testing.assert_array_equal(
        codes, [[127, -127, 1, 0], [127, 2, 0, 0], [0, 64, 0, 0]]
    )
    np.testing.assert_array_equal(np.asarray(payload)[12:], [127, 128, 128])
    np.testing.assert_array_equal(np.float32(back)[2], [0, 128, 0, 0])


@pytest.mark.parametrize("codec, step", [("int8", 2**7), ("e4m3", 2.0**-9 * 2**12)])
def test_what_is_added_up_arrives_and_follows_the_number_of_its_row(codec, step):
    steps = 4000
    row = np.float32([{"int8": 1e4, "e4m3": 1e6}[codec], *[1] * 15])
    rows, numbers = np.tile(row, (steps, 1)), np.arange(steps, dtype=np.int32)

    @jax.jit
    def back(words, numbers):
        payload = row_codec.encode(jnp.asarray(rows), codec, (words, numbers))
        return row_codec.decode(payload, codec, 16)

    words = jnp.uint32([1, 2])
    found = np.asarray(back(words, numbers), np.float64)
    bound = 5 * np.sqrt(step / found[:, 1:].size)  # a variance of at most step x 1
    assert abs(found[:, 1:].mean() - 1) < bound < 0.5
    backwards = np.asarray(back(words, numbers[::-1]), np.float64)
    np.testing.assert_array_equal(backwards[::-1], found)
    # To the nearest, as rows that are read, they are all the same.
    assert np.ptp(np.float32(there_and_back(jnp.asarray(rows), codec)[1])[:, 1]) == 0
