"""Batches from shards: pure in their position, fixed in shape, complete."""

import chex
import numpy as np
import pytest

from loka_jax.data import Position, Schema
from loka_jax.data.reader import ShardDataset
from loka_jax.data.shards import record_dtype


def dataset(
    sizes=(70, 1, 29), num_dense=2, num_fields=3, rows=1000, row_5=None, label_5=None
):
    """Shards whose row i (over all) has dense i + 0.5, ids i and label i % 2.

    `row_5` replaces an id of row 5, `label_5` its label.
    """
    schema = Schema(
        label="click",
        dense=tuple(f"x{j}" for j in range(num_dense)),
        categorical=tuple(f"c{f}" for f in range(num_fields)),
        vocab_sizes=(rows,) * num_fields,
    )
    shards, first = [], 0
    for size in sizes:
        index = np.arange(first, first + size)
        records = np.zeros(size, record_dtype(num_dense, num_fields))
        records["label"] = index % 2
        records["dense"] = index[:, None] + 0.5
        records["ids"] = index[:, None]
        shards.append(records)
        first += size
    if row_5 is not None:
        shards[0]["ids"][5, 1] = row_5
    if label_5 is not None:
        shards[0]["label"][5] = label_5
    return ShardDataset(schema, shards, "logs")


def epoch(data, batch_size, *, epoch=0, seed=0, shuffle=True):
    batches = [
        data.batch(Position(epoch, step, seed), batch_size, shuffle=shuffle)
        for step in range(data.num_batches(batch_size))
    ]
    columns = zip(*(batch[:4] for batch in batches), strict=True)
    return [np.concatenate(parts) for parts in columns]


@pytest.mark.parametrize("batch_size", [1, 7, 10, 100, 128])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_holds_every_row_once(batch_size, shuffle):
    _, ids, _, weights = epoch(dataset(), batch_size, shuffle=shuffle)
    assert sorted(ids[weights == 1][:, 0]) == list(range(100))


def test_columns_of_a_row_stay_together():
    dense, ids, labels, weights = epoch(dataset(), 16)
    real = weights == 1
    assert np.array_equal(dense[real][:, 1], ids[real][:, 2] + 0.5)
    assert np.array_equal(labels[real], ids[real][:, 0] % 2)


def test_without_shuffle_rows_come_in_the_order_of_the_files():
    _, ids, _, weights = epoch(dataset(), 16, shuffle=False)
    assert ids[weights == 1][:, 0].tolist() == list(range(100))


def test_how_rows_are_cut_into_shards_does_not_matter():
    whole = dataset(sizes=(100,)).batch(Position(1, 2, 3), 16, shuffle=True)
    parts = dataset(sizes=(33, 33, 34)).batch(Position(1, 2, 3), 16, shuffle=True)
    chex.assert_trees_all_equal(whole, parts)


def test_the_batch_size_does_not_change_the_order():
    _, small, _, _ = epoch(dataset(), 10)
    _, large, _, _ = epoch(dataset(), 50)
    assert np.array_equal(small, large)


def test_batch_is_a_pure_function_of_its_position():
    data = dataset()
    first = data.batch(Position(4, 1, 9), 32, shuffle=True)
    data.batch(Position(0, 0, 0), 32, shuffle=True)
    again = dataset().batch(Position(4, 1, 9), 32, shuffle=True)
    chex.assert_trees_all_equal(first, again)


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}])
def test_epoch_and_seed_change_the_order(other):
    _, ids, _, _ = epoch(dataset(), 100)
    _, other_ids, _, _ = epoch(dataset(), 100, **other)
    assert not np.array_equal(ids, other_ids)


def test_last_batch_is_filled_with_the_first_rows_at_zero_weight():
    first = dataset().batch(Position(0, 0, 0), 32, shuffle=True)
    batch = dataset().batch(Position(0, 3, 0), 32, shuffle=True)
    assert batch.weights.tolist() == [1.0] * 4 + [0.0] * 28
    chex.assert_trees_all_equal(batch.dense[4:], first.dense[:28])
    chex.assert_trees_all_equal(batch.ids[4:], first.ids[:28])


def test_batch_larger_than_the_data_works():
    batch = dataset(sizes=(3,)).batch(Position(0, 0, 0), 8, shuffle=True)
    assert batch.dense.shape == (8, 2)
    assert batch.weights.sum() == 3


def test_no_dense_columns_give_an_empty_array():
    batch = dataset(num_dense=0).batch(Position(0, 0, 0), 8, shuffle=True)
    assert batch.dense.shape == (8, 0)
    assert batch.dense.dtype == np.float32


def test_no_categorical_columns_give_an_empty_array():
    batch = dataset(num_fields=0).batch(Position(0, 0, 0), 8, shuffle=True)
    assert batch.ids.shape == (8, 0)
    assert batch.ids.dtype == np.int32


def test_dtypes_are_those_of_the_contract():
    batch = dataset().batch(Position(0, 0, 0), 8, shuffle=True)
    assert [x.dtype.name for x in batch[:4]] == [
        "float32",
        "int32",
        "float32",
        "float32",
    ]


@pytest.mark.parametrize("step", [-1, 10])
def test_position_past_the_end_is_refused(step):
    with pytest.raises(ValueError, match=r"must lie in \[0, 10\)"):
        dataset().batch(Position(0, step, 0), 10, shuffle=True)


@pytest.mark.parametrize("batch_size", [0, -4])
def test_batch_size_below_one_is_refused(batch_size):
    with pytest.raises(ValueError, match="at least 1"):
        dataset().num_batches(batch_size)


@pytest.mark.parametrize("bad", [-1, 1000, -(2**31), 2**31 - 1])
def test_id_outside_its_table_is_refused_before_the_device_sees_it(bad):
    data = dataset(row_5=bad)
    with pytest.raises(ValueError, match=f"'c1' holds id {bad}, outside its table"):
        data.batch(Position(0, 0, 0), 100, shuffle=False)


@pytest.mark.parametrize("bad", [-1.0, 0.5, 1e30, np.nan, np.inf])
def test_label_other_than_zero_and_one_is_refused(bad):
    data = dataset(label_5=bad)
    with pytest.raises(ValueError, match="logs holds the label .*, where only 0"):
        data.batch(Position(0, 0, 0), 100, shuffle=False)


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="logs has no rows"):
        dataset(sizes=())
