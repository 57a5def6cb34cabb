"""From ids to embeddings and from gradients back to rows, against matrices in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.data import Batch
from loka_jax.data.batch import Bag
from loka_jax.ops.embedding import BAD_ID
from loka_jax.ops.row_order import Order, places_of
from loka_jax.ops.tables import TableSpec
from loka_jax.train.config import EmbeddingConfig
from loka_jax.train.tables import lookup

ROWS, OFFSETS = (7, 5, 6, 4), (0, 7, 12, 18)  # two fields with one id, two with lists
TABLES = TableSpec(rows=ROWS, dim=8, pooling=("mean", "sum"))
ORDER = Order(sum(ROWS), 4)
SIZE = 12


def batch_of() -> Batch:
    """Examples with lists, ids out of range, empty lists, zero weights and padding."""
    rng = np.random.default_rng(0)
    bags = []
    for rows, slots in ((6, 5), (4, 3)):
        ids = rng.integers(0, rows - 1, (SIZE, slots)).astype(np.int32)
        ids[np.arange(slots) >= rng.integers(0, slots + 1, (SIZE, 1))] = -1
        bags.append(Bag(ids, rng.uniform(0.5, 2, ids.shape).astype(np.float32)))
    bags[0].ids[0, :4] = 6, -2, 2**31 - 1, 1  # the first three are no row's
    bags[1].ids[1, :2], bags[1].weights[1, :2] = (3, 1), (0, 1)  # a weight of zero
    bags[1].weights[bags[1].ids < 0] = 0
    batch = Batch(
        dense=np.zeros((SIZE, 1), np.float32),
        ids=rng.integers(0, (6, 4), (SIZE, 2)).astype(np.int32),
        labels=np.zeros(SIZE, np.float32),
        weights=np.ones(SIZE, np.float32),
        bags=(bags[0]._replace(weights=None), bags[1]),
    )
    batch.weights[-2:] = 0
    batch.ids[-1], batch.bags[0].ids[-1, 0] = (6, 4), 5  # rows of padding alone
    batch.ids[2, 1] = 99
    return batch


def matrices(batch):
    """Returns the weights with which each field of each example takes each row."""
    found = np.zeros((len(ROWS), SIZE, sum(ROWS)))
    single = [Bag(ids[:, None], None) for ids in batch.ids.T]
    for f, (ids, weights) in enumerate([*single, *batch.bags]):
        weights = np.ones(ids.shape) if weights is None else weights
        for b, i in np.ndindex(ids.shape):
            if 0 <= ids[b, i] < ROWS[f]:
                found[f, b, OFFSETS[f] + ids[b, i]] += weights[b, i]
    totals = found[2].sum(1, keepdims=True)
    found[2] /= np.where(totals > 0, totals, 1)
    return found


@pytest.fixture(scope="module")
def results():
    """Returns all that is computed of a batch, by one program, and its inputs."""
    rng = np.random.default_rng(1)
    table = rng.normal(size=(sum(ROWS), 8)).astype(np.float32)
    grads = rng.normal(size=(SIZE, len(ROWS), 8)).astype(np.float32)

    @jax.jit
    def run(batch, table, grads):
        ids = lookup.find(TABLES, batch)
        places, bad_places = lookup.places(TABLES, batch, ORDER)
        slots = jnp.arange(places.v.size, dtype=jnp.int32)
        return {
            "vectors": lookup.embeddings(TABLES, table, ids, jnp.bfloat16),
            "exact": lookup.embeddings(TABLES, table, ids, jnp.float32),
            "gradients": lookup.row_gradients(TABLES, ids, grads, batch.weights),
            "bad": (lookup.count_bad_ids(ids, batch), bad_places),
            "places": places,
            "at_slots": lookup.at_slots(batch, slots),
        }

    batch = batch_of()
    return jax.device_get(run(batch, table, grads)), batch, table, grads


def test_vectors_are_rows_and_sums_and_means_of_lists(results):
    found, batch, table, _ = results
    want = np.einsum("fbr,rd->bfd", matrices(batch), table)
    np.testing.assert_allclose(found["exact"], want, rtol=1e-5, atol=1e-6)
    assert found["vectors"].dtype == jnp.bfloat16
    np.testing.assert_allclose(found["vectors"].astype("f4"), want, 2**-7, 2**-7)
    # Ids out of range are counted, and the padding of lists is not.
    assert tuple(map(int, found["bad"])) == (4, 4)


def test_gradients_reach_the_rows_that_examples_name_and_no_other(results):
    found, batch, _, grads = results
    rows, row_grads = found["gradients"]
    present = (batch.weights > 0)[None, :, None]
    weights = matrices(batch) * present
    want = np.einsum("fbr,bfd->rd", weights, grads)
    total = np.zeros_like(want)
    is_row = rows != BAD_ID
    np.add.at(total, rows[is_row], row_grads[is_row])
    np.testing.assert_allclose(total, want, rtol=1e-4, atol=1e-5)
    # A row of padding, or with a weight of zero, keeps its moments, too.
    assert set(rows[is_row]) == set(np.flatnonzero(weights.any(axis=(0, 1))))


def test_places_are_those_of_the_rows_in_the_order_of_gradients(results):
    found, batch, *_ = results
    places, (rows, _) = found["places"], found["gradients"]
    is_row = rows != BAD_ID
    np.testing.assert_array_equal(places.v < ORDER.shards, is_row)
    at = places.v.astype(np.int64) * ORDER.depth + places.q
    np.testing.assert_array_equal(at[is_row], places_of(rows[is_row], ORDER))
    ids, bags = found["at_slots"].ids, found["at_slots"].bags
    slots = np.concatenate([ids.ravel(), *(bag.ids.ravel() for bag in bags)])
    np.testing.assert_array_equal(slots, np.arange(rows.size))
    assert (bags[0].weights == 1).all()
    np.testing.assert_array_equal(bags[1].weights[:, 0], batch.bags[1].weights)


def test_dims_are_those_of_the_table():
    columns, owners = ("user", "item", "last"), ("user", "item", "user")
    config = EmbeddingConfig(dim=16, dims=("user=4", "item=4096"))
    assert config.dims_of(columns, owners) == {"user": 4, "item": 4096, "last": 4}
    for entry, sentence in (
        ("user=4097", "--embedding.dims user 4097 must be in 1..4096"),
        ("user=x", "--embedding.dims user x must be in 1..4096"),
        ("last=8", "'last=8' must be COLUMN=VALUE; the columns are user, item"),
    ):
        with pytest.raises(ValueError, match=sentence):
            EmbeddingConfig(dims=(entry,)).dims_of(columns, owners)
