"""Ids: by frequency or by hash, the same whatever the file format."""

import numpy as np
import pyarrow as pa
import pytest

from loka_jax.data.blocks import Block
from loka_jax.data.encoding import (
    HashEncoder,
    ModuloEncoder,
    ValueCounter,
    VocabularyEncoder,
    as_text,
    frequent,
)
from tests.support.data import HEADER, open_table, write


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
    ("array", "want"),
    [
        (pa.array(["7", "-3", ""]), ["7", "-3", None]),
        (pa.array([7.0, -3.0, np.nan]), ["7", "-3", None]),
        ([29196072.0, 1e15, 2.5], ["29196072", "1000000000000000", "2.5"]),
        ([2**62 + 1, -(2**62)], ["4611686018427387905", "-4611686018427387904"]),
        ([b"\x07\xff", None, b""], ["07ff", None, None]),
        ([True, False, None], ["true", "false", None]),
    ],
)
def test_a_value_is_what_it_looks_like_with_all_digits(array, want):
    assert text(array).to_pylist() == want


def test_ids_go_by_frequency_then_value():
    encoder = vocabulary(["b", "a", "c", "c"], ["c", "b", "a", "d"])
    assert encoder.values.to_pylist() == ["c", "a", "b", "d"]
    assert encoder.rows == 5
    assert encoder.encode(text(["b", "new", None, "c"])).tolist() == [3, 0, 0, 1]
    rare = vocabulary(["a", "a", "b"], ["c", "c"], min_count=2)
    assert rare.rows == 3 and rare.encode(text(["a", "b", "c"])).tolist() == [1, 0, 2]
    assert VocabularyEncoder(encoder.values, reserved=4).rows == 9
    assert vocabulary(pa.array([None, None], pa.string())).rows == 1


def test_merging_while_counting_changes_nothing():
    rng = np.random.default_rng(0)
    blocks = [rng.integers(200, size=300) for _ in range(20)]
    whole = vocabulary(np.concatenate(blocks))
    assert vocabulary(*blocks, merge_bytes=1000).values.equals(whole.values)


def test_hash_is_the_same_forever():
    encoder = HashEncoder("user", 1000)
    values = text(["a", "b", "68fd1e64", "", None])
    assert encoder.encode(values).tolist() == [167, 187, 776, 0, 0]
    assert HashEncoder("item", 1000).encode(values[:2]).tolist() == [596, 68]
    ids = HashEncoder("user", 3).encode(text(range(99)))
    assert set(ids) == {1, 2}  # row 0 is of missing values


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.large_string()])
def test_the_same_bits_have_the_same_id(kind):
    bits = np.array([0, 5, 2**63 - 1, 2**63, 2**64 - 3], np.uint64)
    numbers = pa.array(bits if kind != pa.int64() else bits.view(np.int64))
    values = pa.array([*map(str, numbers.to_pylist()), None], pa.large_string())
    want = [1 + int(v) % 99 for v in bits] + [0]
    ids = ModuloEncoder(100).encode(values)
    assert ids.dtype == np.int32 and ids.tolist() == want
    assert ModuloEncoder(100).encode(values[:2]).tolist() == want[:2]

    # Hexadecimal numbers are integers, whether they need 64 bits or not.
    for more in ([], [2**64 - 1]):
        hexadecimal = pa.array(["0x1F", *map(hex, more)], pa.large_string())
        want = [1 + v % 99 for v in (31, *more)]
        assert ModuloEncoder(100).encode(hexadecimal).tolist() == want


@pytest.mark.parametrize("bad", ["0x1_0", "-0x1", "0x", "1.5", "1_0", str(2**64)])
def test_what_is_no_integer_has_a_place(bad):
    values = pa.array(["1", None, bad, bad], pa.large_string())
    assert ModuloEncoder(9).encode(values).tolist() == [2, 0, -1, -1]


def test_split_off_rows_do_not_reach_the_vocabulary(tmp_path):
    lines = [f"{i % 2},1,1,only{i},x\n" for i in range(500)]
    path = write(tmp_path / "a.csv", HEADER + "".join(lines))
    splits = open_table(path)
    train, valid = splits.train.num_examples, splits.valid.num_examples
    assert train + valid == 500
    assert splits.train.schema.vocab_sizes[0] == train + 1
    assert splits.report["splits"]["valid"]["totals"]["oov"] == valid
    rare = open_table(path, min_count=2, reserve_rows=3)
    assert rare.train.schema.vocab_sizes == (1 + 3, 2 + 3)
    assert rare.report["splits"]["train"]["totals"]["oov"] == train


def test_unknown_values_can_be_an_error(tmp_path):
    train = write(tmp_path / "train.csv", HEADER + "1,1,1,a,b\n0,1,1,a,b\n")
    rows = "1,1,1,a,b\n" * 90 + "0,1,1,new,b\n"
    valid = write(tmp_path / "valid.csv", HEADER + rows)
    message = "valid.csv row 91 column 'user' holds 'new', which is not in the training"
    with pytest.raises(ValueError, match=message):
        open_table(train, valid=valid, bad="strict")
