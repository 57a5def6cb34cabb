"""The order of rows: a bijection, even over any devices, equal to no order's values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import row_order
from loka_jax.ops.row_order import Order


@pytest.mark.parametrize("rows", [1, 255, 256, 1000, 4096])
@pytest.mark.parametrize("shards", [1, 256])
def test_rows_have_places_of_their_own(rows, shards):
    order = Order(rows, shards)
    places = row_order.places_of(np.arange(order.places), order)
    assert sorted(places.tolist()) == list(range(order.places))
    assert order.places - rows < shards


def test_places_lead_back_to_their_rows():
    order = Order(2**38, 256)  # q fills 30 bits
    rows = np.random.default_rng(0).integers(0, order.rows, 10_000)
    v, q = np.divmod(row_order.places_of(rows, order), order.depth)
    remainder = row_order.remainder_of(v.astype(np.uint32), q.astype(np.uint32), 256)
    np.testing.assert_array_equal(q * 256 + remainder, rows)


@pytest.mark.parametrize(
    "rows",
    [np.arange(0, 2**20, 8), np.arange(0, 2**24, 256), np.arange(2**15)],
    ids=["multiples of the devices", "multiples of all shards", "a small table"],
)
def test_rows_spread_evenly(rows):
    order = Order(2**24, 256)
    for devices in (2, 8):
        owners = row_order.places_of(rows, order) * devices // order.places
        counts = np.bincount(owners, minlength=devices)
        # 5 standard deviations of independent draws.
        mean = len(rows) / devices
        assert counts.max() - mean <= 5 * np.sqrt(mean)


def test_numpy_and_jax_agree():
    words = np.arange(0, 2**32, 2**32 // 1000, dtype=np.uint64).astype(np.uint32)
    want = row_order.hash32(words)
    np.testing.assert_array_equal(row_order.hash32(jnp.asarray(words)), want)
    assert len(set(want.tolist())) == len(words)


def test_initial_values_are_those_of_the_rows_in_their_own_order():
    dim, order, key = 5, Order(700, 256), jax.random.key(3)
    rows = jax.jit(lambda shards: row_order.normal_rows(key, order, dim, shards))
    parts = [rows(np.arange(first, first + 64)) for first in range(0, 256, 64)]
    found = np.concatenate(parts)[row_order.places_of(np.arange(700), order)]
    np.testing.assert_array_equal(found, jax.random.normal(key, (700, dim)))


def test_the_number_of_an_element_has_64_bits():
    order = Order(2**39, 256)
    rows = np.array([0, 2**31 + 3, 2**36 + 77, 2**39 - 1])
    q, remainder = (x.astype(np.uint32) for x in np.divmod(rows, 256))
    for dim, d in ((16, 15), (4096, 4095)):
        high, low = row_order._element(
            *map(jnp.asarray, (q, remainder)), jnp.uint32(d), order, dim
        )
        for row, *words in zip(rows.tolist(), high, low, strict=True):
            assert (int(words[0]) << 32) + int(words[1]) == row * dim + d
