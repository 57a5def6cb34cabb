"""Rows over meshes of eight devices, with replicas, and what travels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from loka_jax.ops import exchange, row_order
from tests.support import exchanges as support

AXES = ("replica", "shard")
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")


@functools.cache
def mesh_of(replicas, shards):
    """Returns a mesh of replicas and shards."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((replicas, shards), AXES, axis_types=auto)


@functools.cache
def exchanged(replicas, shards, capacity=support.EXACT):
    """Returns a compiled exchange, whose sums are of each replica."""

    def step(*arrays):
        among = "replica" if replicas > 1 else None
        how = dict(capacity=capacity, replicas=among)
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


@pytest.mark.parametrize("replicas, shards", ((1, 8), (2, 4), (8, 1)))
@pytest.mark.parametrize("case", support.CASES)
def test_rows_are_read_and_gradients_arrive(replicas, shards, case):
    ids, weights, grads, placed = support.inputs(case)
    run = exchanged(replicas, shards)
    rows, sums, times, need = run(placed, ids, weights, grads)
    for replica in np.asarray(sums):
        np.testing.assert_array_equal(replica, sums[0])
    support.assert_exchanged(case, shards, rows, sums[0], times[0], need, devices=8)


def test_capacity_changes_no_bit_until_a_list_does_not_fit():
    ids, weights, grads, placed = support.inputs("any")
    arrays = placed, ids, weights, grads
    *want, need = map(np.asarray, exchanged(1, 8)(*arrays))
    *found, same = map(np.asarray, exchanged(1, 8, int(need))(*arrays))
    jax.tree.map(np.testing.assert_array_equal, (found, same), (want, need))
    rows, _, fewer, same = map(np.asarray, exchanged(1, 8, int(need) - 1)(*arrays))
    assert same == need < support.EXACT
    lost = np.any(rows != want[0], axis=-1)
    assert lost.any() and not rows[lost].any()
    assert np.sum(fewer) < np.sum(want[2])


def test_what_travels_has_the_bytes_of_the_codec():
    def step(table, ids, grads):
        places = row_order.places_of_ids(support.SPEC, ids, support.ORDER)
        places = jax.tree.map(jnp.ravel, places)
        routed, _ = exchange.route(places, support.ORDER, 16, "shard")
        got = exchange.fetch(table, routed, "bf16", "shard")
        flat = grads.reshape(-1, support.DIM)
        how = dict(replicas="replica")
        return got, *exchange.give_back(routed, flat, "int8", "shard", **how)

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
