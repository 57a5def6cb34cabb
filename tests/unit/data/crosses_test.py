"""Crosses: their ids, alike in batches and in programs, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.data import Position, Schema
from loka_jax.data.crosses import (
    CrossedDataset,
    crossed,
    crosses_of,
    pair_ids,
    with_crosses,
)
from loka_jax.data.reader import ShardDataset, record_dtype_of

SCHEMA = Schema(
    label="click",
    dense=(),
    categorical=("user", "item"),
    multi=("tags",),
    vocab_sizes=(5, 4, 7),
    slots=(3,),
    weighted_multi=("tags",),
)


def dataset():
    draw = np.random.default_rng(0)
    rows = np.zeros(40, record_dtype_of(SCHEMA))
    rows["ids"] = draw.integers(0, (5, 4), (40, 2))
    rows["bag_0"] = np.where(
        draw.random((40, 3)) < 0.3, -1, draw.integers(0, 7, (40, 3))
    )
    rows["bag_weights_0"] = draw.random((40, 3))
    return ShardDataset(SCHEMA, rows, "rows")


def test_batches_have_a_bag_for_each_cross():
    crosses = crosses_of(("user*item=13", "tags*user=64"), SCHEMA)
    data = CrossedDataset(dataset(), crosses)
    assert data.schema == with_crosses(SCHEMA, crosses)
    assert data.schema.fields == ("user", "item", "tags", "user*item", "tags*user")
    assert data.schema.slots == (3, 1, 3)
    batch = data.batch(Position(0, 0, 0), 40, shuffle=False)
    user, item = batch.ids.T
    tags, single, lists = batch.bags
    pairs = np.where((user > 0) & (item > 0), 1 + (user - 1) * 3 + item - 1, 0)
    np.testing.assert_array_equal(single.ids[:, 0], pairs)
    assert single.weights is None
    np.testing.assert_array_equal(lists.weights, tags.weights)
    np.testing.assert_array_equal(lists.ids == -1, tags.ids == -1)
    # Unknown ones share id 0; the others fill a table of one row for each pair.
    is_zero = (lists.ids == 0) | (lists.ids == -1)
    np.testing.assert_array_equal(is_zero, (tags.ids < 1) | (user[:, None] == 0))
    assert lists.ids.max() < 64


@pytest.mark.parametrize("rows, step", [(61, 6), (1000, 0)])
def test_programs_compute_the_ids_of_batches(rows, step):
    draw = np.random.default_rng(1)
    left = draw.integers(0, 11, (500, 1)).astype(np.int32)
    right = draw.integers(-1, 7, (500, 3)).astype(np.int32)
    ids = pair_ids(left, right, rows, step)
    traced = jax.jit(lambda a, b: pair_ids(a, b, rows, step))(left, right)
    assert ids.dtype == np.int32 and traced.dtype == jnp.int32
    np.testing.assert_array_equal(ids, traced)
    known = ids[(left > 0) & (right > 0)]
    assert 1 <= known.min() and known.max() < rows
    assert len(np.unique(known)) > 50  # of 60 pairs


def test_a_cross_in_a_program_is_that_of_a_batch():
    crosses = crosses_of(("user*tags=50",), SCHEMA)
    batch = dataset().batch(Position(0, 0, 0), 40, shuffle=False)
    ours = crossed(batch, SCHEMA, crosses)
    traced = jax.jit(lambda x: crossed(x, SCHEMA, crosses).bags[1].ids)(batch)
    np.testing.assert_array_equal(ours.bags[1].ids, traced)


@pytest.mark.parametrize(
    "entry, why",
    [
        ("user*item", "must be COLUMN.COLUMN=ROWS"),
        ("user*item=1", "with 2 to"),
        ("user*name=9", "names the column 'name', which is not among user, item"),
        ("user*user=9", "two columns"),
        ("tags*tags=9", "two columns"),
    ],
)
def test_what_is_no_cross_is_one_sentence(entry, why):
    with pytest.raises(ValueError, match=why) as error:
        crosses_of((entry,), SCHEMA)
    assert "\n" not in str(error.value)
