"""Stochastic rounding: right on average, from bits that only a row's number decides."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import row_order, row_rounding
from loka_jax.ops.embedding import Rounded, update_rows
from loka_jax.ops.row_order import Order
from loka_jax.ops.row_rounding import round_by
from loka_jax.optim.rows import RowwiseAdagrad, Sgd

ALL_BITS = jnp.arange(2**16, dtype=jnp.uint32)
MAX = float(jnp.finfo(jnp.bfloat16).max)
TRUE = jnp.asarray(True)
ORDER = Order(3000, 1)


def as_float(word):
    return np.array(word, np.uint32).view(np.float32)


def bits_of(seed=0, step=0, order=ORDER, dim=4, rows=None):
    rounding = row_rounding.of_step(seed, jnp.asarray(step), order, dim)
    rows = jnp.arange(order.places, dtype=jnp.int32) if rows is None else rows
    return np.asarray(row_rounding.random_bits(rounding, rows, dim))


# The rounding, by all bits that there are.


def test_the_mean_over_all_bits_is_the_value_itself():
    words = np.random.default_rng(0).integers(0, 2**32, 200, np.uint64)
    words = np.append(words, [1, 0x8000_0001, 0x3F80_0001, 0x3FFF_FFFF, 0x007F_FFFF])
    values = as_float(words)
    for x in values[np.abs(values) < 1e38]:
        rounded = round_by(jnp.full(2**16, x, jnp.float32), ALL_BITS)
        rounded = np.asarray(rounded, np.float64)
        # 2^16 times one of two neighbours: the sum is exact in float64.
        assert rounded.mean() == float(x)
        assert len(np.unique(rounded)) <= 2


def test_values_of_bfloat16_infinities_and_nan_stay():
    values = np.arange(2**16, dtype=np.uint32) << 16  # all of bfloat16
    for bits in (0, 1, 2**15, 2**16 - 1):
        x = jnp.asarray(as_float(values))
        rounded = round_by(x, jnp.full(x.shape, bits, jnp.uint32))
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), x)


@pytest.mark.parametrize("word", [0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_no_bits_carry_a_nan_into_a_number(word):
    x = jax.lax.bitcast_convert_type(jnp.full(2**16, word, jnp.uint32), jnp.float32)
    assert np.isnan(np.asarray(round_by(x, ALL_BITS), np.float32)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_beyond_the_largest_value_lies_infinity(sign):
    x = np.float32(sign) * as_float(0x7F7F_4000)  # a fourth of the way to it
    rounded = np.asarray(round_by(jnp.full(2**16, x), ALL_BITS), np.float32)
    assert set(rounded.tolist()) == {sign * MAX, sign * np.inf}
    assert np.isinf(rounded).mean() == 1 / 4


# The bits.


def test_bits_of_a_step_repeat_and_those_of_others_do_not():
    first = bits_of()
    np.testing.assert_array_equal(first, bits_of())
    for other in (bits_of(seed=1), bits_of(step=1), bits_of(dim=5)[:, :4]):
        # Equal by chance: 0.18 of 12,000, a Poisson number.
        assert np.sum(first == other) <= 5


def test_bits_are_uniform_and_independent():
    steps = np.stack([bits_of(step=step) for step in range(8)]).astype(np.float64)
    u = (steps + 0.5) / 2**16 - 0.5  # mean 0, variance 1/12
    neighbours = {
        "mean": u,
        "step": u[1:] * u[:-1] * 12**0.5,
        "row": u[:, 1:] * u[:, :-1] * 12**0.5,
        "lane": u[..., 1:] * u[..., :-1] * 12**0.5,
    }
    for name, x in neighbours.items():
        # Five deviations of a mean of numbers with variance 1/12.
        assert abs(x.mean()) <= 5 / np.sqrt(12 * x.size), name
    for bit in range(16):
        share = np.mean(steps.astype(np.uint32) >> bit & 1)
        assert abs(share - 0.5) <= 5 * 0.5 / np.sqrt(steps.size), bit


@pytest.mark.parametrize("rows", [1, 256, 2999, 3000])
def test_bits_are_those_of_the_row_in_any_order_on_any_devices(rows):
    want = bits_of(order=Order(rows, 1))
    order = Order(rows, 256)
    for devices in (1, 2, 8):
        shards, parts = order.shards // devices, []
        places = jnp.arange(shards * order.depth, dtype=jnp.int32)
        for device in range(devices):
            rounding = row_rounding.of_step(
                0, jnp.asarray(0), order, 4, jnp.asarray(device * shards)
            )
            parts.append(row_rounding.random_bits(rounding, places, 4))
        found = np.concatenate(parts)[row_order.places_of(np.arange(rows), order)]
        np.testing.assert_array_equal(found, want)


def test_rows_beyond_32_bits_have_bits_of_their_own_number():
    order, devices, dim = Order(2**36 + 5, 256), 256, 3  # a shard has 2^28 + 1 places
    mask = 2**32 - 1

    def hash32(x):
        return int(row_order.hash32(np.array([x & mask], np.uint32))[0])

    for row in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 77, 2**36 + 4):
        place = int(row_order.places_of(np.array([row]), order)[0])
        device, local = divmod(place, order.places // devices)
        rounding = row_rounding.of_step(5, jnp.asarray(9), order, dim, device)
        found = row_rounding.random_bits(rounding, jnp.array([local], jnp.int32), dim)
        k0, k1 = map(int, rounding.words[:2])
        of_row = hash32((hash32(row ^ k0) + (row >> 32)) ^ k1)
        want = [hash32(of_row + lane * 0x9E3779B9) >> 16 for lane in range(dim)]
        assert found.tolist() == [want], row


# Updates.


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def trained(optimizer, steps, is_stochastic, table, grads, lr):
    """A table after steps with the same gradient of every row."""
    order = Order(len(table), 1)
    ids = jnp.arange(len(table), dtype=jnp.int32)

    def step(i, parts):
        how = optimizer
        if is_stochastic:
            how = Rounded(how, row_rounding.of_step(0, i, order, table.shape[1]))
        return update_rows(*parts, ids, grads, how, lr, enabled=TRUE)

    return jax.lax.fori_loop(0, steps, step, (table, optimizer.init(table)))[0]


def test_steps_far_below_half_a_unit_move_rows_in_the_mean():
    table = jnp.full((512, 16), 1.5, jnp.bfloat16)
    unit, steps, lr = 2.0**-7, 64, 2.0**-13  # a step is 1/64 of a unit
    run = functools.partial(trained, Sgd(), steps)
    still = run(False, table, jnp.ones(table.shape), lr)
    np.testing.assert_array_equal(still, table)  # to the nearest: not at all
    moved = np.asarray(run(True, table, jnp.ones(table.shape), lr), np.float64)
    # Each step adds a variance of at most f (1 - f) unit^2, f = lr / unit.
    deviation = np.sqrt(steps * lr / unit) * unit / np.sqrt(moved.size)
    assert abs(moved.mean() - (1.5 - steps * lr)) <= 5 * deviation
    assert deviation < steps * lr / 50  # so that standing still would fail


def test_adagrad_in_bfloat16_follows_float32_in_the_mean():
    steps, lr, unit = 40, 2.0**-9, 2.0**-7
    table, ones = jnp.full((512, 16), 1.25, jnp.bfloat16), jnp.ones((512, 16))
    exact = trained(RowwiseAdagrad(), steps, False, table.astype(jnp.float32), ones, lr)
    found = trained(RowwiseAdagrad(), steps, True, table, ones, lr)
    error = np.asarray(found, np.float64) - np.asarray(exact, np.float64)
    # A rounding has a variance of at most unit^2 / 4.
    assert abs(error.mean()) <= 5 * np.sqrt(steps / error.size) * unit / 2


def test_float32_tables_take_no_part_in_it():
    table, ids = jnp.ones((4, 2)), jnp.arange(4, dtype=jnp.int32)

    def update(table):
        return update_rows(table, (), ids, table, Sgd(), 0.1, enabled=TRUE)[0]

    text = jax.jit(update).lower(table).as_text()
    assert "bitcast_convert" not in text and "xor" not in text
