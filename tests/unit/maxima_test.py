"""Powers of two whose sums and means are read as the largest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import maxima


@jax.jit
def decode(entries):
    return maxima.decode(entries)[..., 0]


@jax.jit
def encode(x):
    return maxima.encode(x[..., None])


def test_every_power_in_the_range_is_read_as_it_was():
    low, high = np.log2([maxima.SMALLEST, maxima.LARGEST])
    x = np.exp2(np.arange(low, high + 1, dtype=np.float32))
    np.testing.assert_array_equal(decode(encode(x)), x)
    for factor in (2.0**-20, 1 / 48, 2.0**14, 2.0**-32):
        entries = np.float32(2.0**-14 * factor) * encode(x)
        np.testing.assert_array_equal(decode(entries), x)
    half = decode((2.0**-14 * encode(x)).astype(jnp.float16).astype(jnp.float32))
    assert np.all((half == x) | (half == 0))  # read as never measured
    ends = encode(np.float32([1e-30, 3e38, 0.0]))
    np.testing.assert_array_equal(decode(ends), [maxima.SMALLEST, maxima.LARGEST, 0])


@pytest.mark.parametrize("count", [2, 5, 8])
@pytest.mark.parametrize("spread", [2, 6, 60, 200])
def test_sums_of_up_to_eight_are_read_as_the_largest(count, spread):
    rng = np.random.default_rng(count * spread)
    tops = rng.integers(-70, 121, 256)
    exponents = tops + rng.integers(-spread, 1, (count, 256))
    exponents[1:, :64] = exponents[0, :64] - 2  # the worst: all others at a fourth
    x = np.exp2(np.clip(exponents, -78, 121).astype(np.float32))
    total = jnp.sum(encode(x), axis=0) * (1 / count)
    np.testing.assert_array_equal(decode(total), x.max(0))
    rounded = total.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(decode(rounded), x.max(0))


def test_one_far_above_a_hundred_others_is_read_at_a_fourth_at_least():
    for below in range(1, 12):
        x = np.float32([1.0] + [2.0**-below] * 99)
        assert decode(jnp.sum(encode(x), axis=0)) >= 1 / 4


def test_a_negative_or_infinite_entry_is_no_sum():
    entries = encode(np.ones(3, np.float32))
    bad = entries.at[0, 3].set(-1e-9).at[1, 2].set(jnp.inf).at[2, 2].set(jnp.nan)
    assert not np.any(maxima.is_sum(bad)) and np.all(maxima.is_sum(entries))
