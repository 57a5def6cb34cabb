"""Batches from shards: pure in their position, complete, in a computed shuffle."""

import chex
import jax
import numpy as np
import pytest

from loka_jax.data import Part, Position, Schema
from loka_jax.data.reader import (
    ShardDataset,
    key_of,
    permute,
    record_dtype_of,
    stratified,
)

START = Position(0, 0, 0)


LISTS = {"multi": ("m",), "slots": (4,), "vocab_sizes": (1000, 1001, 1002, 7)}
LISTS |= {"weighted_multi": ("m",), "weighted": True, "further_labels": ("buy",)}


def dataset(size=100, num_dense=2, num_fields=3, *, row_5=None, **options):
    """Records whose row i has label i % 2, dense i + 0.5 + 1000 j, ids i + j.

    `row_5` says what row 5 holds: a name of the record, a place, a value.
    """
    schema = Schema(
        label="click",
        dense=tuple(f"x{j}" for j in range(num_dense)),
        categorical=tuple(f"c{f}" for f in range(num_fields)),
        **({"vocab_sizes": (1000, 1001, 1002)[:num_fields]} | options),
    )
    index = np.arange(size)
    records = np.zeros(len(index), record_dtype_of(schema))
    records["label"] = (index % 2).reshape(-1, *[1] * (records["label"].ndim - 1))
    records["dense"] = index[:, None] + 0.5 + 1000 * np.arange(num_dense)
    records["ids"] = index[:, None] + np.arange(num_fields)
    if row_5 is not None:
        name, place, value = row_5
        records[name][5, *place] = value
    return ShardDataset(schema, records, "logs")


def epoch(data, batch_size, shuffle=True):
    batches = [
        data.batch(Position(0, step, 0), batch_size, shuffle=shuffle)
        for step in range(data.num_batches(batch_size))
    ]
    columns = zip(*(batch[:4] for batch in batches), strict=True)
    return [np.concatenate(parts) for parts in columns]


@pytest.mark.parametrize("batch_size", [1, 7, 100, 128])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_holds_every_row_once_with_all_its_columns(batch_size, shuffle):
    dense, ids, labels, weights = epoch(dataset(), batch_size, shuffle)
    row = ids[:, 0]
    assert np.array_equal(dense, row[:, None] + [0.5, 1000.5])
    assert np.array_equal(ids, row[:, None] + [0, 1, 2])
    assert np.array_equal(labels, row % 2)
    assert weights.tolist() == [1] * 100 + [0] * (len(row) - 100)
    real = row[:100].tolist()
    assert sorted(real) == list(range(100)) and (shuffle or real == sorted(real))
    assert np.array_equal(row[100:], row[: len(row) - 100])  # padding


def test_batch_is_a_pure_function_of_its_position():
    data, place = dataset(), Position(4, 1, 9)
    first = data.batch(place, 32, shuffle=True)
    chex.assert_trees_all_equal(first, dataset().batch(place, 32, shuffle=True))
    for other in (Position(5, 1, 9), Position(4, 1, 8), Position(4, 2, 9)):
        ids = data.batch(other, 32, shuffle=True).ids
        assert not np.array_equal(ids, first.ids)
    assert np.array_equal(epoch(dataset(), 10)[1], epoch(data, 50)[1])


# The last batch of 100 rows is padded: its rows lie in the first of two parts.
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(("count", "shuffle"), [(8, True), (2, False)])
def test_parts_are_together_the_whole_batch(step, count, shuffle):
    data, place = dataset(), Position(1, step, 7)
    parts = [
        data.batch(place, 32, shuffle=shuffle, part=Part(i, count))
        for i in range(count)
    ]
    together = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    chex.assert_trees_all_equal(together, data.batch(place, 32, shuffle=shuffle))


def test_batches_have_the_dtypes_of_the_contract_without_columns_too():
    for counts in ((0, 3), (2, 0)):
        data = dataset(3, *counts)
        batch = data.batch(START, 8, shuffle=True)
        shapes = (8, counts[0], 8, max(counts[1], 1))
        assert (*batch.dense.shape, *batch.ids.shape) == shapes
        dtypes = [x.dtype.name for x in batch[:4]]
        assert dtypes == ["float32", "int32", "float32", "float32"]
        with pytest.raises(ValueError, match="at least 1"):
            data.num_batches(0)
        for step in (-1, 1):
            with pytest.raises(ValueError, match=r"must lie in \[0, 1\)"):
                data.batch(Position(0, step, 0), 8, shuffle=True)


@pytest.mark.parametrize(
    ("row_5", "options", "why"),
    [
        (("ids", (1,), -1), {}, "'c1' holds id -1, outside its table of 1001 rows"),
        (("ids", (1,), 1001), {}, "'c1' holds id 1001, outside its table"),
        (("bag_0", (2,), -2), LISTS, "column 'm' holds id -2, outside"),
        (("bag_0", (2,), 7), LISTS, "column 'm' holds id 7, outside"),
        (("bag_weights_0", (2,), -1), LISTS, "holds the weight -1"),
        (("weight", (), -1), LISTS, "holds the weight -1, .* convert the data again"),
        (("weight", (), np.inf), LISTS, "holds the weight inf"),
        (("label", (1,), 3), LISTS, "holds the label 3"),
        (("label", (), np.nan), {}, "logs holds the label nan, where only 0"),
    ],
)
def test_what_shards_may_not_hold_is_refused_before_a_device_sees_it(
    row_5, options, why
):
    with pytest.raises(ValueError, match=why):
        dataset(row_5=row_5, **options).batch(START, 100, shuffle=False)


@pytest.mark.parametrize(
    "row_5",
    [("ids", (1,), 1000), ("bag_0", (2,), 6), ("bag_0", (2,), -1)]
    + [("label", (1,), np.nan), ("weight", (), 3), ("bag_weights_0", (2,), 3)],
)
def test_what_shards_may_hold_comes_back(row_5):
    batch = dataset(row_5=row_5, **LISTS).batch(START, 100, shuffle=False)
    name, place, value = row_5
    bag = batch.bags[0]
    arrays = {"ids": batch.ids, "bag_0": bag.ids, "label": batch.labels}
    arrays |= {"weight": batch.weights, "bag_weights_0": bag.weights}
    assert np.array_equal(arrays[name][5, *place], value, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 1023, 65_537, 3_000_000_000])
def test_every_index_comes_exactly_once(size):
    # All of them, or the last ones of billions, which need no table.
    index = np.arange(max(0, size - 100_000), size)
    out = permute(index, size, key_of(1, 2))
    assert len(np.unique(out)) == len(out) and out.min() >= 0
    assert size // 2 <= out.max() < size
    assert np.array_equal(permute(index[-9:], size, key_of(1, 2)), out[-9:])


def test_indices_of_several_permutations_have_their_own_sizes():
    size, keys = np.array([1, 2, 5, 8]), np.arange(4, dtype=np.uint64)
    index = [np.arange(own) for own in size]
    out = permute(np.concatenate(index), np.repeat(size, size), np.repeat(keys, size))
    for own, images in zip(index, np.split(out, np.cumsum(size)[:-1]), strict=True):
        assert np.array_equal(np.sort(images), own)


@pytest.mark.parametrize("count", [50, 49, 43, 7, 3])
def test_a_batch_has_one_example_of_each_stratum_and_an_epoch_all(count):
    bounds, found = np.arange(8) * count // 7, []
    for step in range(-(-count // 7)):
        index, is_real = stratified(key_of(4, 2), step, 7, count)
        ranks = (index - bounds[:-1])[is_real]
        assert (ranks >= 0).all() and (index < bounds[1:])[is_real].all()
        if count >= 43 and is_real.all():
            assert len(set(ranks.tolist())) > 1
        assert is_real.all() or step == (count - 1) // 7
        found += index[is_real].tolist()
    assert sorted(found) == list(range(count))


def test_order_is_the_same_forever():
    # A change here reorders every run that resumes.
    out = permute(np.arange(8), 8, key_of(0, 0))
    assert out.tolist() == [4, 1, 6, 3, 0, 2, 5, 7]
    out = permute(np.arange(5), 100_003, key_of(3, 1))
    assert out.tolist() == [6489, 13066, 80247, 83839, 25074]
