"""Ids: by frequency or by hash, the same whatever the file format."""

import numpy as np
import pyarrow as pa
import pytest

from loka_jax.data.blocks import Block
from loka_jax.data.encoding import (
    HashEncoder,
    ValueCounter,
    VocabularyEncoder,
    as_text,
    frequent,
)
from tests.support.data import HEADER, open_table, rows_of, rows_text, write


def text(values, kind=None):
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    table = pa.table({"c": array})
    return as_text(Block(table, np.arange(len(array)), "logs.parquet"), "c")


def vocabulary(*blocks, min_count=1, **options):
    counter = ValueCounter(**options)
    for values in blocks:
        counter.add(text(values))
    return VocabularyEncoder(frequent(counter.ranked(), min_count))


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["7", "-3", None]),
        pa.array(["7", "-3", ""]),
        pa.array([7, -3, None], pa.int32()),
        pa.array([7.0, -3.0, None]),
        pa.array([7.0, -3.0, np.nan]),
        pa.array(["7", "-3", None]).dictionary_encode(),
    ],
)
def test_a_value_is_what_it_looks_like(array):
    assert text(array).to_pylist() == ["7", "-3", None]


def test_whole_floats_read_as_integers_at_any_size():
    values = [29196072.0, 1e15, 2.5, -1e300]
    assert text(values).to_pylist() == [
        "29196072",
        "1000000000000000",
        "2.5",
        "-1e+300",
    ]


def test_int64_values_keep_all_digits():
    values = [2**62 + 1, 2**62, -(2**62)]
    assert len(set(text(values, pa.int64()).to_pylist())) == 3


def test_lists_are_refused():
    with pytest.raises(ValueError, match="logs.parquet column 'c' holds list"):
        text([[1], [2]])


def test_ids_go_by_frequency_then_value():
    encoder = vocabulary(["b", "a", "c", "c"], ["c", "b", "a", "d"])
    assert encoder.values.to_pylist() == ["c", "a", "b", "d"]
    assert encoder.rows == 5


def test_unknown_and_missing_values_get_id_zero():
    encoder = vocabulary(["a", "a", "b"])
    assert encoder.encode(text(["b", "new", None, "a"])).tolist() == [2, 0, 0, 1]


def test_rare_values_share_id_zero():
    encoder = vocabulary(["a", "a", "b"], ["c", "c"], min_count=2)
    assert encoder.rows == 3
    assert encoder.encode(text(["a", "b", "c"])).tolist() == [1, 0, 2]


def test_merging_while_counting_changes_nothing():
    rng = np.random.default_rng(0)
    blocks = [rng.integers(200, size=300) for _ in range(20)]
    whole = vocabulary(np.concatenate(blocks))
    assert vocabulary(*blocks, merge_bytes=1000).values.equals(whole.values)


def test_an_empty_column_has_one_row():
    assert vocabulary(pa.array([None, None], pa.string())).rows == 1


def test_hash_is_the_same_forever():
    ids = HashEncoder("user", 1000).encode(text(["a", "b", "68fd1e64", "", None]))
    assert ids.tolist() == [167, 187, 776, 0, 0]


def test_hash_tells_fields_apart():
    values = text([str(i) for i in range(100)])
    a, b = (HashEncoder(name, 1 << 20).encode(values) for name in ("user", "item"))
    assert np.count_nonzero(a == b) == 0


def test_hash_fills_its_table_evenly_and_never_uses_row_zero():
    values = text(np.arange(100_000))
    ids = HashEncoder("user", 101).encode(values)
    counts = np.bincount(ids, minlength=101)
    assert counts[0] == 0
    # Poisson: mean 1000, deviation 32.
    assert np.abs(counts[1:] - 1000).max() < 5 * 32


@pytest.mark.parametrize("encoding", ["vocabulary", "hash"])
def test_negative_and_int64_values_are_values_like_any_other(tmp_path, encoding):
    values = [-1, 2**40, 2**33 + 5, 5] * 9
    lines = [f"{i % 2},1,1,{value},x\n" for i, value in enumerate(values)]
    path = write(tmp_path / "a.csv", HEADER + "".join(lines))
    splits = open_table(path, encoding=encoding, hash_buckets=1000)
    users = rows_of(splits).ids[:, 0]
    assert len(np.unique(users)) == 4 and users.min() >= 1


def test_vocabulary_is_built_from_training_rows_only(tmp_path):
    train = write(tmp_path / "train.csv", HEADER + "1,1,1,a,b\n0,1,1,a,b\n")
    valid = write(tmp_path / "valid.csv", HEADER + rows_text(20))
    splits = open_table(train, valid=valid)
    assert splits.train.schema.vocab_sizes == (2, 2)
    assert not rows_of(splits, "valid").ids.any()


def test_split_off_rows_do_not_reach_the_vocabulary(tmp_path):
    lines = [f"{i % 2},1,1,only{i},x\n" for i in range(500)]
    splits = open_table(write(tmp_path / "a.csv", HEADER + "".join(lines)))
    train, valid = splits.train.num_examples, splits.valid.num_examples
    assert train + valid == 500
    assert splits.train.schema.vocab_sizes[0] == train + 1
    assert splits.report["splits"]["valid"]["totals"]["oov"] == valid


def test_unknown_values_can_be_an_error(tmp_path):
    train = write(tmp_path / "train.csv", HEADER + "1,1,1,a,b\n0,1,1,a,b\n")
    valid = write(tmp_path / "valid.csv", HEADER + "1,1,1,a,b\n0,1,1,new,b\n")
    message = "valid.csv row 2 column 'user' holds 'new', which is not in the training"
    with pytest.raises(ValueError, match=message):
        open_table(train, valid=valid, unknown="error")
