"""Rows over devices: every id reads its row, every row gets its gradients, once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops import embedding, exchange, row_order
from loka_jax.ops.row_order import Order
from loka_jax.ops.swap import swapped
from loka_jax.ops.tables import TableSpec

AXES = ("replica", "shard")
BATCH, DIM = 64, 4
SPEC = TableSpec(rows=(500, 3, 900), dim=DIM)
ORDER = Order(SPEC.total_rows, 256)
PLACES = row_order.places_of(np.arange(SPEC.total_rows), ORDER)
EXACT = BATCH * 3  # no list is longer than this


@functools.cache
def mesh_of(replicas, shards):
    if jax.device_count() < replicas * shards:
        pytest.skip("needs eight devices")
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((replicas, shards), AXES, axis_types=auto)


@functools.cache
def exchanged(replicas, shards, capacity=EXACT):
    """The rows of ids, the sums of gradients [S depth, D], counts, and the need."""

    def step(table, ids, weights, grads):
        places = row_order.places_of_ids(SPEC, ids, ORDER)
        places = places.where(weights[:, None] > 0, ORDER.shards)
        places = jax.tree.map(jnp.ravel, places)
        routed, need = exchange.route(places, ORDER, capacity, "shard")
        payload = exchange.offered(table, routed, "f32")
        got = exchange.received_lists(swapped(payload, "shard"), "f32", DIM)
        each = exchange.fetch(table, routed, "f32", "shard").reshape(*ids.shape, DIM)
        rows = embedding.lookup(got, routed.slots).reshape(*ids.shape, DIM)
        rows = jnp.where(rows == each, rows, jnp.nan)
        sent = exchange.give_back(
            routed,
            grads.reshape(-1, DIM),
            "f32",
            "shard",
            replicas="replica" if replicas > 1 else None,
        )
        given, sums = sent
        total = jnp.zeros_like(table).at[given].add(sums, mode="drop")
        times = jnp.zeros(len(table)).at[given].add(1.0, mode="drop")
        return rows, total[None], times[None], jax.lax.pmax(need, AXES)

    mesh = mesh_of(replicas, shards)
    step = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P("shard"), P(AXES), P(AXES), P(AXES)),
        out_specs=(P(AXES), P("replica", "shard"), P("replica", "shard"), P()),
        check_vma=False,
    )
    return jax.jit(step)


def table(seed=0):
    rows = np.random.default_rng(seed).normal(size=(SPEC.total_rows, DIM))
    placed = np.zeros((ORDER.places, DIM), np.float32)
    placed[PLACES] = rows
    return placed


def ids_of(name):
    rng = np.random.default_rng(1)
    ids = rng.integers(0, SPEC.rows, (BATCH, 3)).astype(np.int32)
    match name:
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


def flat(ids):
    """The rows of ids in one table; -1 of bad ones."""
    is_good = (ids >= 0) & (ids < SPEC.rows)
    return np.where(is_good, ids + np.array(SPEC.offsets), -1)


CASES = ("any", "one row", "multiples of the devices", "one owner", "bad")
MESHES = ((1, 8), (2, 4), (4, 2), (8, 1))


@pytest.mark.parametrize("replicas, shards", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_rows_are_read_and_gradients_arrive(replicas, shards, case):
    ids, weights = ids_of(case), np.ones(BATCH, np.float32)
    weights[40:56] = 0  # two devices of eight have nothing but padding
    grads = np.random.default_rng(2).normal(size=(BATCH, 3, DIM)).astype(np.float32)
    placed = table()
    rows, sums, times, need = exchanged(replicas, shards)(placed, ids, weights, grads)

    used = np.where(weights[:, None] > 0, flat(ids), -1)
    want = np.where(used[..., None] >= 0, placed[PLACES[used]], 0)
    np.testing.assert_array_equal(rows, want)

    exact = np.zeros((ORDER.places, DIM))
    np.add.at(exact, PLACES[used[used >= 0]], grads[used >= 0].astype(np.float64))
    # At most 64 gradients of a row, none above 4.
    for replica in np.asarray(sums):
        np.testing.assert_allclose(replica, exact, atol=64 * 64 * 4 * 2.0**-24)
        np.testing.assert_array_equal(replica, sums[0])

    lists = [len(set(part)) for part in owned(used, shards)]
    assert int(need) == max(lists)
    np.testing.assert_array_equal(np.asarray(times)[0], asked_of(used, shards))


def owned(used, shards):
    """The places that each device asks each owner for."""
    for part in np.split(used, 8):
        places = PLACES[part[part >= 0]]
        owners = places * shards // ORDER.places
        for owner in range(shards):
            yield places[owners == owner]


def asked_of(used, shards):
    """How many devices look up each place."""
    times = np.zeros(ORDER.places)
    for places in owned(used, shards):
        times[np.unique(places)] += 1
    return times


def test_capacity_changes_no_bit_until_a_list_does_not_fit():
    ids, ones = ids_of("any"), np.ones(BATCH, np.float32)
    grads = np.random.default_rng(2).normal(size=(BATCH, 3, DIM)).astype(np.float32)
    args = (table(), ids, ones, grads)
    *want, need = exchanged(1, 8)(*args)
    *found, same = exchanged(1, 8, int(need))(*args)
    assert int(need) == int(same) < EXACT
    jax.tree.map(np.testing.assert_array_equal, found, want)
    rows, _, times, same = exchanged(1, 8, int(need) - 1)(*args)
    assert int(same) == int(need)
    lost = np.any(np.asarray(rows) != np.asarray(want[0]), axis=-1)
    assert lost.any() and not np.asarray(rows)[lost].any()
    assert np.sum(times) < np.sum(want[2])


def test_ids_on_all_devices_read_their_rows_everywhere():
    ids, placed = ids_of("bad")[:5], table()

    def look(table, ids):
        places = row_order.places_of_ids(SPEC, ids, ORDER)
        return exchange.fetch_everywhere(table, places, ORDER, "shard")

    look = jax.shard_map(
        look,
        mesh=mesh_of(2, 4),
        in_specs=(P("shard"), P()),
        out_specs=P(),
        check_vma=False,
    )
    rows, used = jax.jit(look)(placed, ids), flat(ids)
    want = np.where(used[..., None] >= 0, placed[PLACES[used]], 0)
    np.testing.assert_array_equal(rows, want)


@pytest.mark.parametrize("rows", [2**31 - 2, 2**33])
def test_rows_beyond_int32_are_sorted_by_their_places(rows):
    field = min(rows, 2**31 - 1)
    spec = TableSpec(rows=(field,) * (rows // field), dim=1)
    order = Order(spec.total_rows, 256)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, field, (50, len(spec.rows)))
    ids[3] = -1
    found = row_order.places_of_ids(spec, jnp.asarray(ids, jnp.int32), order)
    places = row_order.Places(*map(jnp.ravel, found))
    if order.places < 2**31:
        place, positions = exchange._sorted(places, order)
        got = np.asarray(place, np.int64)
    else:
        v, q, positions = exchange._sorted_pairs(places)
        got = np.asarray(v, np.int64) * order.depth + np.asarray(q)
    rows = np.where(ids >= 0, ids + np.array(spec.offsets), -1).ravel()
    want = row_order.places_of(rows, order)
    np.testing.assert_array_equal(sorted(positions), np.arange(rows.size))
    sorted_rows = rows[np.asarray(positions)]
    assert (sorted_rows[-len(spec.rows) :] == -1).all()
    good = np.flatnonzero(sorted_rows >= 0)
    np.testing.assert_array_equal(got[good], want[np.asarray(positions)][good])
    assert np.all(np.diff(got[good]) >= 0)


def test_what_travels_has_the_bytes_of_the_codec():
    def step(table, ids, grads):
        places = row_order.places_of_ids(SPEC, ids, ORDER)
        places = jax.tree.map(jnp.ravel, places)
        routed, _ = exchange.route(places, ORDER, 16, "shard")
        got = exchange.fetch(table, routed, "bf16", "shard")
        sent = exchange.give_back(
            routed, grads.reshape(-1, DIM), "int8", "shard", replicas="replica"
        )
        return got, *sent

    specs = (P("shard"), P(AXES), P(AXES))
    mapped = jax.shard_map(
        step, mesh=mesh_of(2, 4), in_specs=specs, out_specs=P(AXES), check_vma=False
    )
    grads = jnp.zeros((BATCH, 3, DIM))
    jaxpr = str(jax.make_jaxpr(mapped)(table(), ids_of("any"), grads))
    sent = [line for line in jaxpr.splitlines() if "= all_to_all[" in line]
    assert ["i32[4,16]", "u16[4,64]", "u8[4,80]"] == [
        line.split("=")[0].split(":")[1].strip() for line in sent
    ]
    gathered = [line for line in jaxpr.splitlines() if "= all_gather[" in line]
    assert ["i32[8,16]", "u8[8,80]"] == [
        line.split("=")[0].split(":")[1].strip() for line in gathered
    ]


def test_several_arrays_travel_in_one_collective():
    mesh = mesh_of(1, 8)
    rng = np.random.default_rng(0)
    arrays = {
        "words": rng.integers(0, 2**16, (64, 6)).astype(np.uint16),
        "numbers": rng.integers(-(2**31), 2**31, (64, 5, 2)).astype(np.int32),
        "floats": rng.normal(size=(64, 3)).astype(np.float32),
    }
    swap = jax.jit(
        jax.shard_map(
            functools.partial(swapped, axis="shard"),
            mesh=mesh,
            in_specs=P("shard"),
            out_specs=P("shard"),
            check_vma=False,
        )
    )
    found = swap(arrays)
    for name, array in arrays.items():
        want = array.reshape(8, 8, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
        np.testing.assert_array_equal(found[name], want)
    text = swap.lower(arrays).compile().as_text()
    assert text.count(" all-to-all(") == 1
