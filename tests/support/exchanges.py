"""An exchange of rows between devices, and what it should bring each of them."""

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.ops import embedding, exchange, row_order
from loka_jax.ops.joint_collectives import swap
from loka_jax.ops.row_order import Order
from loka_jax.ops.tables import TableSpec
from loka_jax.unbiased import words_of

BATCH, DIM = 64, 4
SPEC = TableSpec(rows=(500, 3, 900), dim=DIM)
ORDER = Order(SPEC.total_rows, 256)
PLACES = row_order.places_of(np.arange(SPEC.total_rows), ORDER)
EXACT = BATCH * 3  # no list is longer than this
CASES = ("any", "one row", "multiples of the devices", "one owner", "bad")


def step(table, ids, weights, grads, *, capacity, replicas=None, codec="f32"):
    """Returns the rows of ids, sums of gradients, how often each came, and the need."""
    places = row_order.places_of_ids(SPEC, ids, ORDER)
    places = places.where(weights[:, None] > 0, ORDER.shards)
    places = jax.tree.map(jnp.ravel, places)
    routed, need = route(places, capacity)
    payload = swap(exchange.rows_to_send(table, routed, "f32"), "shard")
    got = exchange.receive_lists(payload, "f32", DIM)
    each = exchange.receive_rows(payload, routed, "f32", DIM)
    each = each.reshape(*ids.shape, DIM)
    rows = embedding.lookup(got, routed.slots).reshape(*ids.shape, DIM)
    rows = jnp.where(rows == each, rows, jnp.nan)
    flat = grads.reshape(-1, DIM)
    words = words_of(jax.random.key(0), "shard", 1)[0]
    payload = swap(exchange.sums_to_send(routed, flat, codec, words), "shard")
    given, sums = exchange.receive_sums(payload, routed, codec, DIM, replicas)
    sums = sums.astype(table.dtype)
    total = jnp.zeros_like(table).at[given].add(sums, mode="drop")
    times = jnp.zeros(len(table)).at[given].add(1.0, mode="drop")
    return rows, total, times, need


def route(places, capacity):
    """Returns the route of places with its lists exchanged, and the need."""
    routed, need = exchange.route(places, ORDER, capacity, "shard")
    return routed._replace(asked=swap(routed.asked, "shard")), need


def table():
    """Returns normal rows at their places."""
    rows = np.random.default_rng(0).normal(size=(SPEC.total_rows, DIM))
    placed = np.zeros((ORDER.places, DIM), np.float32)
    placed[PLACES] = rows
    return placed


def ids_of(case):
    """Returns the ids of a batch."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, SPEC.rows, (BATCH, 3)).astype(np.int32)
    match case:
        case "one row":
            ids[:] = 1
        case "multiples of the devices":
            ids[:, 2] = rng.integers(0, 112, BATCH) * 8
        case "one owner":
            first = np.flatnonzero(PLACES < ORDER.places // 8)
            ids[:, 0] = rng.choice(first[first < 500], BATCH)
            ids[:, 1:] = -1
        case "bad":
            ids[::2] = [-1, 3, 2**31 - 1]
    return ids


def inputs(case):
    """Returns ids, weights, gradients and the table."""
    weights = np.ones(BATCH, np.float32)
    weights[40:56] = 0  # a quarter of the devices has nothing but padding
    shape = (BATCH, 3, DIM)
    grads = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    return ids_of(case), weights, grads, table()


def flat(ids):
    """Returns the rows of ids in one table; -1 of bad ones."""
    is_good = (ids >= 0) & (ids < SPEC.rows)
    return np.where(is_good, ids + np.array(SPEC.offsets), -1)


def rows_of(placed, rows):
    """Returns the values of rows, zeros for -1."""
    return np.where(rows[..., None] >= 0, placed[PLACES[rows]], 0)


def assert_exchanged(case, shards, rows, sums, times, need, devices=None):
    """Asserts what came of a case: rows, and of each place its sum and who asked.

    `shards` devices share a table; there are more `devices` if there are replicas.
    """
    ids, weights, grads, placed = inputs(case)
    used = np.where(weights[:, None] > 0, flat(ids), -1)
    np.testing.assert_array_equal(rows, rows_of(placed, used))
    exact = np.zeros((ORDER.places, DIM))
    np.add.at(exact, PLACES[used[used >= 0]], grads[used >= 0].astype(np.float64))
    # At most 64 gradients of a row in a device's list, none above 4.
    sums = np.asarray(sums).reshape(-1, DIM)
    np.testing.assert_allclose(sums, exact, atol=64 * 64 * 4 * 2.0**-24)
    asked, longest = np.zeros(ORDER.places), 0
    for part in np.split(used, devices or shards):
        places = np.unique(PLACES[part[part >= 0]])
        asked[places] += 1
        owners = np.bincount(places * shards // ORDER.places, minlength=shards)
        longest = max(longest, *owners)
    assert int(need) == longest
    np.testing.assert_array_equal(np.ravel(times), asked)
