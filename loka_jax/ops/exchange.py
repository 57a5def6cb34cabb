"""Rows of tables over several devices: to where they are looked up, gradients back.

Inside of a `jax.shard_map` with `check_vma=False`. Each of L devices holds the rows of
S / L virtual shards (`row_order`), and ids for N lookups. For every id that is there
once or more it asks the owner for one row:

    ids         sort by place  ->  a list of distinct places for each owner  ->  owners
    rows        owners read [L C, D] rows  ->  back  ->  each id reads its own
    gradients   sums by distinct place  ->  owners

An arrow between devices is an all-to-all of the caller, who sends several things at
once (`joint_collectives.swap`): functions make what is sent, or take what has come. How
rows are cast for the wire is `row_codec`'s.

Lists have a fixed capacity of C places, as compiled programs have fixed shapes. `need`
is the length of the longest one: while it is at most C, the result is exact and C
changes no bit of it. Beyond, the ids that did not fit read zeros, and the caller must
route again with a larger C: nothing may be trained on such rows.

An id that is ignored (`Places`) reads zeros, is sent nowhere and has no gradient.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt32

from loka_jax.mapped import by_kernel
from loka_jax.ops import embedding, row_codec
from loka_jax.ops.embedding import BAD_ID
from loka_jax.ops.row_codec import Codec
from loka_jax.ops.row_order import Order, Places
from loka_jax.triton import Implementation, chosen
from loka_jax.triton import route as _triton
from loka_jax.triton.route import Lists


class Routed(NamedTuple):
    """The route of N ids to their owners; a slot is a place in the lists [L C].

    Attributes:
        asked: the rows of this device's part of the table that each device asks for;
            `BAD_ID` in unused entries.
        slots: of each id; `BAD_ID` where it is ignored or did not fit.
        sorted_slots: the same in the order of the places.
        order: the position in `slots` of each of `sorted_slots`.
        ends: the last place in `sorted_slots` of each slot; `BAD_ID` if it has none.
    """

    asked: Int[Array, "L C"]
    slots: Int[Array, "N"]
    sorted_slots: Int[Array, "N"]
    order: Int[Array, "N"]
    ends: Int[Array, "L C"]


def route(
    places: Places,
    order: Order,
    capacity: int,
    axis: str,
    *,
    implementation: Implementation | None = None,
) -> tuple[Routed, Int[Array, ""]]:
    """Returns the route of the ids, and the longest list of this device.

    `asked` is as it is to be sent: the rows that this device asks of each other one.

    Args:
        axis: the mesh axis over which the rows are spread.
        implementation: as in `embedding.sum_by_row`; all have equal results.
    """
    devices = jax.lax.axis_size(axis)
    how: Any = {"owners": devices, "capacity": capacity}
    if order.places + order.depth >= 2**32:  # two keys cost more than one
        lists, positions = _lists_of_pairs(places, order, how)
    else:
        place, positions = _sorted(places, order)
        how["part"] = order.places // devices
        why_not = _triton.why_not(place.size, devices)
        if chosen(implementation, why_not, "route") == "triton":
            lists = by_kernel(functools.partial(_triton.lists, **how), place, positions)
        else:
            lists = lists_by_xla(place, positions, **how)
    routed = Routed(
        asked=lists.asked,
        slots=lists.slots,
        sorted_slots=lists.sorted_slots,
        order=positions,
        ends=lists.ends,
    )
    return routed, lists.need


def rows_to_send(
    table: Float[Array, "P D"],
    routed: Routed,
    codec: Codec,
    *,
    implementation: Implementation | None = None,
) -> Shaped[Array, "L w"]:
    """Returns the rows that each device asks for, to be sent.

    Args:
        routed: from `route`, its lists `asked` exchanged.
        implementation: as in `row_codec.gather`.
    """
    return row_codec.gather(table, routed.asked, codec, implementation=implementation)


def receive_rows(
    payload: Shaped[Array, "L w"],
    routed: Routed,
    codec: Codec,
    dim: int,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "N D"]:
    """Returns the row of each id, zeros where it is ignored or did not fit.

    From what all devices have sent by `rows_to_send`.
    """
    return row_codec.scatter(
        payload, routed.slots, codec, dim, implementation=implementation
    )


def receive_lists(
    payload: Shaped[Array, "L w"], codec: Codec, dim: int
) -> Float[Array, "LC D"]:
    """Returns the rows of the lists: a table for lookups of `slots`, as pooled ones."""
    return row_codec.decode(payload, codec, dim).reshape(-1, dim)


def sums_to_send(
    routed: Routed,
    grads: Float[Array, "N D"],
    codec: Codec,
    words: UInt32[Array, "2"],
    *,
    implementation: Implementation | None = None,
) -> Shaped[Array, "L w"]:
    """Returns the float32 sums of gradients for the owners of their rows, to be sent.

    Args:
        grads: a gradient for each id.
        words: of this step and device, which decide how codes of 8 bits are rounded.
        implementation: as in `embedding.sum_by_row`.
    """
    sums = embedding.sum_sorted(
        routed.sorted_slots, routed.order, grads, implementation=implementation
    )
    # Rounded by their places among all sums, which no capacity changes.
    return row_codec.gather(
        sums.grads, routed.ends, codec, words, implementation=implementation
    )


def receive_sums(
    payload: Shaped[Array, "L w"],
    routed: Routed,
    codec: Codec,
    dim: int,
    replicas: str | None = None,
) -> tuple[Int[Array, "K C"], Float[Array, "K C D"]]:
    """Returns rows of this device's part and their gradients, for `update_rows`.

    From what all devices have sent by `sums_to_send`. A row is there once for each
    device that looked it up, in a list of its own, which ascends.

    Args:
        routed: from `route`, its lists `asked` exchanged.
        replicas: the mesh axis over which the table is replicated, each replica with
            ids of its own; all of them get what each got. None if there is one.
    """
    rows = routed.asked
    if replicas is not None:
        rows, payload = (
            jax.lax.all_gather(x, replicas, tiled=True) for x in (rows, payload)
        )
    return rows, row_codec.decode(payload, codec, dim)


def fetch_everywhere(
    table: Float[Array, "P D"], places: Places, order: Order, axis: str
) -> Float[Array, "*N D"]:
    """Returns the rows of ids that all devices have, on all devices.

    For few ids: each device reads the rows that it holds, and the sum has all.
    """
    shards = np.uint32(order.shards // jax.lax.axis_size(axis))
    row = (places.v % shards) * np.uint32(order.depth) + places.q
    is_mine = (places.v // shards).astype(jnp.int32) == jax.lax.axis_index(axis)
    mine = jnp.where(is_mine, row.astype(jnp.int32), BAD_ID)
    return jax.lax.psum(embedding.lookup(table, mine), axis)


def _sorted(places: Places, order: Order) -> tuple[UInt32[Array, "N"], Int[Array, "N"]]:
    """Returns the sorted places v depth + q, and the former position of each.

    That of ignored ids is S depth.
    """
    positions = jnp.arange(places.v.size, dtype=jnp.int32)
    q = jnp.where(places.v < order.shards, places.q, 0)
    place = places.v * np.uint32(order.depth) + q
    place, positions = jax.lax.sort((place, positions), num_keys=1, is_stable=True)
    return place, positions


def _sorted_pairs(
    places: Places,
) -> tuple[UInt32[Array, "N"], UInt32[Array, "N"], Int[Array, "N"]]:
    """Returns v and q in the order of the places, and the former position of each."""
    positions = jnp.arange(places.v.size, dtype=jnp.int32)
    keys = (places.v, places.q, positions)
    v, q, positions = jax.lax.sort(keys, num_keys=2, is_stable=True)
    return v, q, positions


def lists_by_xla(
    place: UInt32[Array, "N"],
    positions: Int[Array, "N"],
    owners: int,
    part: int,
    capacity: int,
) -> Lists:
    """Returns what `triton.route.lists` does."""
    owner = (place // np.uint32(part)).astype(jnp.int32)
    row = (place % np.uint32(part)).astype(jnp.int32)
    return _of_owners(owner, row, place[1:] != place[:-1], positions, owners, capacity)


def _lists_of_pairs(places: Places, order: Order, how: Any) -> tuple[Lists, Array]:
    """Returns the lists of places that are no 32-bit number, and the positions."""
    v, q, positions = _sorted_pairs(places)
    shards = order.shards // how["owners"]  # of each owner
    # S is the v of ignored ids, whose owner is then L: no device.
    owner = (v // np.uint32(shards)).astype(jnp.int32)
    row = (v % np.uint32(shards)) * np.uint32(order.depth) + q
    changed = (v[1:] != v[:-1]) | (q[1:] != q[:-1])
    lists = _of_owners(owner, row.astype(jnp.int32), changed, positions, **how)
    return lists, positions


def _of_owners(owner, row, changed, positions, owners: int, capacity: int) -> Lists:
    """Returns the lists of sorted ids."""
    is_id = owner < owners
    edge = jnp.ones(min(1, owner.size), bool)
    is_first = is_id & jnp.append(edge, changed)
    count = jnp.cumsum(is_first, dtype=jnp.int32)
    # By counting: XLA's binary search is a loop of launches, and devices are few.
    parts = jnp.arange(owners + 1, dtype=jnp.int32)
    starts = jnp.searchsorted(owner, parts, method="compare_all")
    before = jnp.append(jnp.zeros(1, jnp.int32), count)[starts]  # distinct ones
    rank = count - 1 - before[owner]
    slots = jnp.where(is_id & (rank < capacity), owner * capacity + rank, BAD_ID)

    empty = jnp.full(owners * capacity, BAD_ID, jnp.int32)
    asked = _write(empty, jnp.where(is_first, slots, BAD_ID), row)
    is_last = jnp.append(changed, edge)
    at = jnp.arange(owner.size, dtype=jnp.int32)
    ends = _write(empty, jnp.where(is_last, slots, BAD_ID), at)
    return Lists(
        asked=asked.reshape(owners, capacity),
        ends=ends.reshape(owners, capacity),
        slots=_write(jnp.empty_like(slots), positions, slots),
        sorted_slots=slots,
        need=jnp.max(before[1:] - before[:-1]),
    )


def _write(into: Array, at: Int[Array, "N"], values: Array) -> Array:
    """Returns an array with values written at distinct places, but not at `BAD_ID`."""
    return into.at[at].set(
        values, mode="drop", unique_indices=True, wrap_negative_indices=False
    )
