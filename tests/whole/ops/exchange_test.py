"""Rows over devices: every id reads its row, every row gets its gradients, once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops import exchange, row_order
from loka_jax.ops.joint_collectives import swap
from loka_jax.ops.row_order import Order
from loka_jax.ops.tables import TableSpec
from tests.support import exchanges as support

needs_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
AXES = ("replica", "shard")


@functools.cache
def mesh_of(replicas, shards):
    """Returns a mesh of replicas and shards."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((replicas, shards), AXES, axis_types=auto)


@functools.cache
def exchanged(replicas, shards, capacity=support.EXACT, codec="f32"):
    """Returns a compiled exchange, whose sums are of each replica."""

    def step(*arrays):
        among = "replica" if replicas > 1 else None
        how = dict(capacity=capacity, replicas=among, codec=codec)
        rows, total, times, need = support.step(*arrays, **how)
        return rows, total[None], times[None], jax.lax.pmax(need, AXES)

    specs = P("replica", "shard")
    mapped = jax.shard_map(
        step,
        mesh=mesh_of(replicas, shards),
        in_specs=(P("shard"), P(AXES), P(AXES), P(AXES)),
        out_specs=(P(AXES), specs, specs, P()),
        check_vma=False,
    )
    return jax.jit(mapped)


@needs_devices
@pytest.mark.parametrize(
    "replicas, shards, case",
    [*((2, 4, case) for case in support.CASES), (1, 8, "any"), (8, 1, "bad")],
)
def test_rows_are_read_and_gradients_arrive(replicas, shards, case):
    ids, weights, grads, placed = support.inputs(case)
    run = exchanged(replicas, shards)
    rows, sums, times, need = run(placed, ids, weights, grads)
    for replica in np.asarray(sums):
        np.testing.assert_array_equal(replica, sums[0])
    support.assert_exchanged(case, shards, rows, sums[0], times[0], need, devices=8)


@needs_devices
def test_capacity_changes_no_bit_until_a_list_does_not_fit():
    ids, weights, grads, placed = support.inputs("any")
    arrays = placed, ids, weights, grads
    for codec in ("int8", "f32"):  # the first has random bits
        *want, need = map(np.asarray, exchanged(2, 4, codec=codec)(*arrays))
        *found, same = map(np.asarray, exchanged(2, 4, int(need), codec)(*arrays))
        jax.tree.map(np.testing.assert_array_equal, (found, same), (want, need))
    rows, _, fewer, same = map(np.asarray, exchanged(2, 4, int(need) - 1)(*arrays))
    assert same == need < support.EXACT
    lost = np.any(rows != want[0], axis=-1)
    assert lost.any() and not rows[lost].any()
    assert np.sum(fewer) < np.sum(want[2])


@needs_devices
def test_what_travels_has_the_bytes_of_the_codec():
    def step(table, ids, grads):
        places = row_order.places_of_ids(support.SPEC, ids, support.ORDER)
        places = jax.tree.map(jnp.ravel, places)
        routed, _ = support.route(places, 16)
        rows = swap(exchange.rows_to_send(table, routed, "bf16"), "shard")
        got = exchange.receive_rows(rows, routed, "bf16", support.DIM)
        flat, words = grads.reshape(-1, support.DIM), jnp.zeros(2, jnp.uint32)
        sums = swap(exchange.sums_to_send(routed, flat, "int8", words), "shard")
        return got, *exchange.receive_sums(sums, routed, "int8", 4, "replica")

    specs = (P("shard"), P(AXES), P(AXES))
    mapped = jax.shard_map(
        step, mesh=mesh_of(2, 4), in_specs=specs, out_specs=P(AXES), check_vma=False
    )
    ids, _, grads, placed = support.inputs("any")
    lines = str(jax.make_jaxpr(mapped)(placed, ids, grads)).splitlines()

    def types(name):
        found = [line for line in lines if f"= {name}[" in line]
        return [line.split("=")[0].split(":")[1].strip() for line in found]

    assert types("all_to_all") == ["i32[4,16]", "u16[4,64]", "u8[4,80]"]
    assert types("all_gather") == ["i32[8,16]", "u8[8,80]"]


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
        return pairs, exchange.lists_by_xla(
            *exchange._sorted(places, order), part=part, **how
        )

    pairs, plain = both(places)
    assert plain.need > 30  # so that some places have no slot
    # Ignored ids are in another order, but nothing is asked for them.
    for name in ("asked", "slots", "ends", "need"):
        np.testing.assert_array_equal(getattr(pairs, name), getattr(plain, name))


@needs_devices
def test_ids_on_all_devices_read_their_rows_everywhere():
    ids = support.ids_of("bad")[:5]
    placed = support.table()

    def look(table):
        places = row_order.places_of_ids(support.SPEC, jnp.asarray(ids), support.ORDER)
        return exchange.fetch_everywhere(table, places, support.ORDER, "shard")[None]

    how = dict(in_specs=P("shard"), out_specs=P("shard"), check_vma=False)
    for rows in jax.jit(jax.shard_map(look, mesh=mesh_of(1, 8), **how))(placed):
        np.testing.assert_array_equal(rows, support.rows_of(placed, support.flat(ids)))
