"""From the ids of a batch to embeddings, and from their gradients back to rows.

A field with one id gets its row, a multi-valued field the sum or mean of its rows, so
that the model sees one vector a field. Differentiated are these vectors, `[B, F, D]`:
the gradients of pooled rows follow from them without a second pass over the tables.

B examples, F fields of which the first f have one id, H ids of a multi-valued field, D
embedding dim, N row gradients of a step; C rows of events of K fields, and samples of P
fields, of an event log.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from loka_jax.data import Batch
from loka_jax.ops import embedding
from loka_jax.ops.row_order import Order, Places, places_of_ids


class BagIds(NamedTuple):
    """A multi-valued field: its ids in the stacked tables, and their weights."""

    ids: Int[Array, "B 1 H"]
    weights: Float[Array, "B 1 H"]


class BatchIds(NamedTuple):
    """The ids of a batch in the stacked tables.

    Attributes:
        ids: of the fields with one id.
        bags: of the multi-valued fields.
        events: of the fields of the events of an event log; `BAD_ID` where there is
            no event.
    """

    ids: Int[Array, "B f"]
    bags: tuple[BagIds, ...]
    events: Int[Array, "C K"] | None = None


def find(tables: embedding.TableSpec, batch: Batch) -> BatchIds:
    """Returns the ids of a batch in the stacked tables.

    Where there are events, the fields of the samples come first.
    """
    if batch.events is not None:
        first, ids = batch.ids.shape[1], jnp.asarray(batch.events.ids)
        events = embedding.flat_ids(tables, ids, slice(first, None))
        return BatchIds(_ids_of_samples(tables, batch), (), events)
    single = tables.num_single
    ids = embedding.flat_ids(tables, jnp.asarray(batch.ids), slice(single))
    bags = []
    for field, bag in enumerate(batch.bags, single):
        flat = embedding.flat_ids(
            tables, jnp.asarray(bag.ids)[:, None], slice(field, field + 1)
        )
        weights = jnp.ones(bag.ids.shape) if bag.weights is None else bag.weights
        bags.append(BagIds(flat, jnp.asarray(weights)[:, None]))
    return BatchIds(ids, tuple(bags))


def _ids_of_samples(tables: embedding.TableSpec, batch: Batch) -> Int[Array, "B P"]:
    """Returns the ids of the fields of the samples, `BAD_ID` of those of padding."""
    ids = jnp.asarray(batch.ids)
    assert batch.events is not None
    is_sample = jnp.diff(jnp.asarray(batch.events.offsets)) > 0
    ids = embedding.flat_ids(tables, ids, slice(ids.shape[1]))
    return jnp.where(is_sample[:, None], ids, embedding.BAD_ID)


def places(
    tables: embedding.TableSpec, batch: Batch, order: Order
) -> tuple[Places, Int[Array, ""]]:
    """Returns the places of a batch's rows, and the number of ids out of range.

    The order is that of `row_gradients`. Padding is ignored: examples of weight 0, and
    values in lists that are missing or have weight 0.
    """
    if batch.events is not None:
        return _places_of_events(tables, batch, order)
    single = tables.num_single
    is_example = jnp.asarray(batch.weights)[:, None] > 0
    bad, parts = jnp.zeros((), jnp.int32), []
    if single:  # XLA (jax 0.11.2) ends the process at empty operands here
        places = places_of_ids(tables, jnp.asarray(batch.ids), order, slice(single))
        bad = bad + jnp.sum(places.v == order.shards, dtype=jnp.int32)
        parts.append(places.where(is_example, order.shards))
    for field, bag in enumerate(batch.bags, single):
        ids, fields = jnp.asarray(bag.ids)[:, None], slice(field, field + 1)
        places = places_of_ids(tables, ids, order, fields)
        is_bad = (places.v == order.shards) & (ids != -1)
        bad = bad + jnp.sum(is_bad, dtype=jnp.int32)
        keep = is_example[:, None]
        if bag.weights is not None:
            keep = keep & (jnp.asarray(bag.weights)[:, None] != 0)
        parts.append(places.where(keep, order.shards))
    return _flat(parts), bad


def _places_of_events(
    tables: embedding.TableSpec, batch: Batch, order: Order
) -> tuple[Places, Int[Array, ""]]:
    assert batch.events is not None
    first, ids = batch.ids.shape[1], jnp.asarray(batch.events.ids)
    parts = [places_of_ids(tables, ids, order, slice(first, None))]
    bad = jnp.sum((parts[0].v == order.shards) & (ids != -1), dtype=jnp.int32)
    if first:  # as above
        samples = places_of_ids(tables, jnp.asarray(batch.ids), order, slice(first))
        is_sample = jnp.diff(jnp.asarray(batch.events.offsets))[:, None] > 0
        parts.insert(0, samples.where(is_sample, order.shards))
    return _flat(parts), bad


def _flat(parts: list[Places]) -> Places:
    columns = zip(*parts, strict=True)
    return Places(*(jnp.concatenate([x.ravel() for x in y]) for y in columns))


def at_slots(batch: Batch, slots: Int[Array, "N"]) -> BatchIds:
    """Returns what `find` does, with the slots of fetched rows as ids.

    Args:
        slots: of the ids, in the order of `places`.
    """
    if batch.events is not None:
        samples, events = jnp.split(slots, [batch.ids.size])
        ids = events.reshape(batch.events.ids.shape)
        return BatchIds(samples.reshape(batch.ids.shape), (), ids)
    sizes = [batch.ids.size, *(bag.ids.size for bag in batch.bags)]
    first, *others = jnp.split(slots, np.cumsum(sizes)[:-1])
    bags = []
    for part, bag in zip(others, batch.bags, strict=True):
        weights = jnp.ones(bag.ids.shape) if bag.weights is None else bag.weights
        ids = part.reshape(bag.ids.shape)
        bags.append(BagIds(ids[:, None], jnp.asarray(weights)[:, None]))
    return BatchIds(first.reshape(batch.ids.shape), tuple(bags))


def embeddings(
    tables: embedding.TableSpec,
    table: Float[Array, "R D"],
    batch_ids: BatchIds,
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "B F D"] | tuple[Float[Array, "B P D"], Float[Array, "C K D"]]:
    """Returns a vector for each field, in `dtype`; of events those of samples, too."""
    rows = embedding.lookup(table, batch_ids.ids).astype(dtype)
    if batch_ids.events is not None:
        return rows, embedding.lookup(table, batch_ids.events).astype(dtype)
    if not batch_ids.bags:
        return rows
    pooled = [
        embedding.lookup_pooled(table, *bag, pooling).astype(dtype)
        for bag, pooling in zip(batch_ids.bags, tables.pooling, strict=True)
    ]
    return jnp.concatenate([rows, *pooled], axis=1)


def row_gradients(
    tables: embedding.TableSpec,
    batch_ids: BatchIds,
    grads: Any,
    weights: Float[Array, "N"],
) -> tuple[Int[Array, "*N"], Float[Array, "*N D"]]:
    """Returns the touched rows and their gradients, for `embedding.update_rows`.

    Padding rows carry no gradient; leaving them out keeps moments untouched too.
    """
    if batch_ids.events is not None:
        dim, ids = tables.dim, (batch_ids.ids, batch_ids.events)
        flat = jnp.concatenate([x.ravel() for x in ids])
        return flat, jnp.concatenate([x.reshape(-1, dim) for x in grads])
    present = weights[:, None] > 0
    ids = jnp.where(present, batch_ids.ids, embedding.BAD_ID)
    if not batch_ids.bags:
        return ids, grads
    single = tables.num_single
    all_ids = [ids.ravel()]
    all_grads = [grads[:, :single].reshape(-1, grads.shape[-1])]
    for field, bag in enumerate(batch_ids.bags, single):
        row_ids, row_grads = embedding.pooled_row_grads(
            grads[:, field : field + 1],
            bag.ids,
            jnp.where(present[:, None], bag.weights, 0),
            tables.pooling[field - single],
        )
        all_ids.append(row_ids)
        all_grads.append(row_grads.astype(grads.dtype))
    return jnp.concatenate(all_ids), jnp.concatenate(all_grads)


def count_bad_ids(batch_ids: BatchIds, batch: Batch) -> Int[Array, ""]:
    """Returns the number of ids out of range; padding is none."""
    if batch_ids.events is not None and batch.events is not None:
        is_bad = batch_ids.events == embedding.BAD_ID
        is_bad &= jnp.asarray(batch.events.ids) != -1
        return jnp.sum(is_bad, dtype=jnp.int32)
    bad = embedding.count_bad_ids(batch_ids.ids)
    for bag, ids in zip(batch_ids.bags, batch.bags, strict=True):
        padding = jnp.sum(jnp.asarray(ids.ids) == -1, dtype=jnp.int32)
        bad = bad + embedding.count_bad_ids(bag.ids) - padding
    return bad
