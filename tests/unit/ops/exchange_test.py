"""Rows over devices: every id reads its row, every row gets its gradients, once.

Devices are examples of `vmap` here, which has the collectives of a mesh; meshes are in
tests/whole.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.ops import exchange, row_order
from loka_jax.ops.row_order import Order
from loka_jax.ops.tables import TableSpec
from tests.support import exchanges as support


def on_devices(step):
    """Returns a compiled function on four devices, of arrays that are cut in dim 0."""
    run = jax.jit(jax.vmap(step, axis_name="shard"))
    return lambda *arrays: run(*(x.reshape(4, -1, *x.shape[1:]) for x in arrays))


@functools.cache
def exchanged():
    """Returns the exchange over four devices."""
    return on_devices(functools.partial(support.step, capacity=support.EXACT))


@pytest.mark.parametrize("case", support.CASES)
def test_rows_are_read_and_gradients_arrive(case):
    ids, weights, grads, placed = support.inputs(case)
    rows, *others, need = exchanged()(placed, ids, weights, grads)
    rows = rows.reshape(*ids.shape, support.DIM)
    support.assert_exchanged(case, 4, rows, *others, max(need))


def test_rows_beyond_int32_are_sorted_by_their_places():
    field = 2**31 - 1
    spec = TableSpec(rows=(field,) * 4, dim=1)
    order = Order(spec.total_rows, 256)
    ids = np.random.default_rng(0).integers(0, field, (50, 4))
    ids[3] = -1

    @jax.jit
    def in_order(ids):
        found = row_order.places_of_ids(spec, ids, order)
        return exchange._sorted_pairs(row_order.Places(*map(jnp.ravel, found)))

    v, q, positions = in_order(ids.astype(np.int32))
    found = np.asarray(v, np.int64) * order.depth + np.asarray(q)
    rows = np.where(ids >= 0, ids + np.array(spec.offsets), -1).ravel()
    np.testing.assert_array_equal(sorted(positions), np.arange(rows.size))
    rows = rows[np.asarray(positions)]
    assert (rows[-4:] == -1).all() and (rows[:-4] >= 0).all()
    np.testing.assert_array_equal(found[:-4], row_order.places_of(rows[:-4], order))
    assert np.all(np.diff(found[:-4]) >= 0)


def test_lists_of_places_and_of_pairs_are_the_same():
    order, how = Order(3000, 256), {"owners": 4, "capacity": 30}
    rng = np.random.default_rng(0)
    v = rng.integers(0, 257, 200).astype(np.uint32)  # 256: to be ignored
    places = row_order.Places(v, rng.integers(0, 3, 200).astype(np.uint32))

    @jax.jit
    def both(places):
        pairs, _ = exchange._lists_of_pairs(places, order, how)
        part = order.places // 4
        return pairs, exchange._lists(
            *exchange._sorted(places, order), part=part, **how
        )

    pairs, plain = both(places)
    assert plain.need > 30  # so that some places have no slot
    # Ignored ids are in another order, but nothing is asked for them.
    for name in ("asked", "slots", "ends", "need"):
        np.testing.assert_array_equal(getattr(pairs, name), getattr(plain, name))


def test_ids_on_all_devices_read_their_rows_everywhere():
    ids = support.ids_of("bad")[:5]
    placed = support.table()

    def look(table):
        places = row_order.places_of_ids(support.SPEC, jnp.asarray(ids), support.ORDER)
        return exchange.fetch_everywhere(table, places, support.ORDER, "shard")

    for rows in on_devices(look)(placed):
        np.testing.assert_array_equal(rows, support.rows_of(placed, support.flat(ids)))
