"""Stochastic rounding: right on average, from bits that only a row's number decides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.ops import row_order, row_rounding
from loka_jax.ops.row_order import Order

ORDER, DIM = Order(3000, 1), 4
round_by = jax.jit(row_rounding.round_by)


def as_float(words):
    """Returns the float32 numbers of words."""
    return np.array(words, np.uint32).view(np.float32)


@functools.partial(jax.jit, static_argnames=("order", "dim"))
def bits_at(seed, step, places, first_shard, *, order, dim=DIM):
    """Returns the random bits of places in a part of a table."""
    rounding = row_rounding.of_step(seed, step, order, dim, first_shard)
    return row_rounding.random_bits(rounding, places, dim)


def bits_of(seed=0, step=0, dim=DIM):
    """Returns the random bits of all rows in a step."""
    places = np.arange(ORDER.places, dtype=np.int32)
    return np.asarray(bits_at(seed, step, places, 0, order=ORDER, dim=dim))


def test_the_mean_over_all_bits_is_the_value_itself():
    words = np.random.default_rng(0).integers(0, 2**32, 59, np.uint64)
    words = np.append(words, [1, 0x8000_0001, 0x3F80_0001, 0x3FFF_FFFF, 0x007F_FFFF])
    x = np.where(np.abs(as_float(words)) < 1e38, as_float(words), 1.1)
    bits = np.arange(2**16, dtype=np.uint32)
    every = np.broadcast_to(bits[:, None], (2**16, len(x)))
    found = round_by(np.broadcast_to(x, every.shape), every)
    rounded = np.asarray(found, np.float64)
    # 2^16 times one of two neighbours: the sum is exact in float64.
    np.testing.assert_array_equal(rounded.mean(axis=0), x.astype(np.float64))
    assert all(len(np.unique(column)) <= 2 for column in rounded.T)


def test_values_of_bfloat16_infinities_and_nan_stay():
    values = as_float(np.arange(2**16, dtype=np.uint64) << 16)  # all of bfloat16
    nans = as_float([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
    x = np.append(values, nans)
    for bits in (0, 1, 2**15, 2**16 - 1):
        rounded = round_by(x, np.full(x.shape, bits, np.uint32))
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), x)


def test_bits_are_uniform_and_independent():
    steps = np.stack([bits_of(step=step) for step in range(8)]).astype(np.float64)
    u = (steps + 0.5) / 2**16 - 0.5  # mean 0, variance 1/12
    neighbours = {
        "mean": u,
        "step": u[1:] * u[:-1] * 12**0.5,
        "row": u[:, 1:] * u[:, :-1] * 12**0.5,
        "lane": u[..., 1:] * u[..., :-1] * 12**0.5,
    }
    assert np.mean(bits_of(seed=1) == steps[0]) < 1e-3  # of another seed others
    for name, x in neighbours.items():
        # Five deviations of a mean of numbers with variance 1/12.
        assert abs(x.mean()) <= 5 / np.sqrt(12 * x.size), name
    for bit in range(16):
        share = np.mean(steps.astype(np.uint32) >> bit & 1)
        assert abs(share - 0.5) <= 5 * 0.5 / np.sqrt(steps.size), bit


def test_bits_are_those_of_the_row_in_any_order_on_any_devices():
    want, order = bits_of(), Order(ORDER.rows, 256)
    for devices in (1, 8):
        shards = order.shards // devices
        places = np.arange(shards * order.depth, dtype=np.int32)
        parts = [
            bits_at(0, 0, places, device * shards, order=order)
            for device in range(devices)
        ]
        found = np.concatenate(parts)[row_order.places_of(np.arange(3000), order)]
        np.testing.assert_array_equal(found, want)


def test_rows_beyond_32_bits_have_bits_of_their_own_number():
    order, devices, dim = Order(2**36 + 5, 256), 256, 3  # a shard has 2^28 + 1 places
    mask, k = 2**32 - 1, row_rounding.of_step(5, jnp.asarray(9), order, dim).words

    def hash32(x):
        return int(row_order.hash32(np.array([x & mask], np.uint32))[0])

    for row in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 77, 2**36 + 4):
        place = int(row_order.places_of(np.array([row]), order)[0])
        device, local = divmod(place, order.places // devices)
        found = bits_at(5, 9, np.int32([local]), device, order=order, dim=dim)
        k0, k1 = map(int, k[:2])
        of_row = hash32((hash32(row ^ k0) + (row >> 32)) ^ k1)
        want = [hash32(of_row + lane * 0x9E3779B9) >> 16 for lane in range(dim)]
        assert found.tolist() == [want], row
