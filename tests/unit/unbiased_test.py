"""Rounding to codes that is right on average: all draws together give the value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import unbiased
from loka_jax.fp8 import E4M3

DRAWS = 2**10
ROUND = {"int8": unbiased.to_int8, "e4m3": unbiased.to_e4m3}
CODES = {"int8": np.arange(-127.0, 128), "e4m3": np.arange(256, dtype=np.uint8)}
CODES["e4m3"] = np.asarray(CODES["e4m3"].view(E4M3), np.float64)
CODES["e4m3"] = CODES["e4m3"][np.isfinite(CODES["e4m3"])]


@pytest.mark.parametrize("format", ROUND)
def test_the_mean_over_all_draws_is_the_value_and_codes_stay(format):
    codes = np.unique(CODES[format])
    share = np.arange(1, 8)[:, None] / 8  # of the distance of two neighbours
    between = (codes[:-1] + share * np.diff(codes)).ravel()
    u = np.linspace(0, 1, DRAWS, endpoint=False, dtype=np.float32)[:, None]
    x = np.concatenate([codes, between]).astype(np.float32)
    found = np.asarray(jax.jit(ROUND[format])(*np.broadcast_arrays(x, u)), np.float64)
    np.testing.assert_array_equal(found.mean(axis=0), x.astype(np.float64))
    assert all(len(np.unique(column)) == 2 for column in found[:, len(codes) :].T)
    assert not np.ptp(found[:, : len(codes)], axis=0).any()


def test_draws_are_uniform_and_independent_of_each_other():
    words = jax.random.bits(jax.random.key(0), (4, 2), jnp.uint32)
    numbers = jnp.arange(2000, dtype=jnp.int32)
    every = jax.vmap(lambda w: unbiased.uniform(w, numbers, 16))(words)
    u = np.asarray(every, np.float64) - 0.5  # mean 0, variance 1/12
    neighbours = [u, u[1:] * u[:-1], u[:, 1:] * u[:, :-1], u[..., 1:] * u[..., :-1]]
    for product in (*neighbours, u**2 - 1 / 12):
        assert abs(product.mean()) < 5 * product.std() / product.size**0.5
    assert u.min() >= -0.5 and u.max() < 0.5


def test_devices_have_words_of_their_own_and_a_step_has_the_same_again():
    def words(key):
        one = jax.vmap(lambda _: unbiased.words_of(key, "d", 2), axis_name="d")
        return np.asarray(one(jnp.zeros(4)))

    first, again, other = (words(jax.random.key(seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert len({int(x) for x in (*first.ravel(), *other.ravel())}) == 32
