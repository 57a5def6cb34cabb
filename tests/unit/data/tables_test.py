"""Columns: their tables, what they share, and those whose values mean nothing."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data.encoding import HashEncoder
from loka_jax.data.learn import column_facts
from tests.support.data import open_table, read_in_small_parts, rows_of, write

HEADER = "click,item,last,tags\n"
COLUMNS = {"dense": (), "categorical": ("item", "last")}


def opened(folder, rows=None, **options):
    folder.mkdir(exist_ok=True)
    if rows is None:
        rows = [(i % 5, i % 7, f"{i % 3}|{i % 8}") for i in range(60)]
    lines = (f"{i % 2},{a},{b},{c}\n" for i, (a, b, c) in enumerate(rows))
    path = write(folder / "clicks.csv", HEADER + "".join(lines))
    return open_table(path, **(COLUMNS | options))


def vocabulary(folder, field):
    (path,) = (folder / "cache").glob(f"*/vocabulary-{field:02d}.parquet")
    return parquet.read_table(path)["value"].to_pylist()


def values_of(splits, field, text):
    """Returns the values of a field's training ids."""
    return np.array([None, *text])[rows_of(splits).ids[:, field]].tolist()


def test_a_hash_size_is_of_its_column(tmp_path):
    splits = opened(tmp_path, hash_sizes=("last=12",))
    assert splits.train.schema.vocab_sizes == (6, 12)
    assert rows_of(splits).ids[:, 1].min() > 0
    both = opened(tmp_path, hash_sizes=("last=12",), encoding="hash", hash_buckets=9)
    assert both.train.schema.vocab_sizes == (9, 12)
    assert np.array_equal(rows_of(both).ids[:, 1], rows_of(splits).ids[:, 1])


def test_hashed_integers_are_taken_modulo(tmp_path):
    splits = opened(tmp_path / "a", hashed=("item",), hash_sizes=("item=4",))
    assert splits.train.schema.vocab_sizes == (4, 8)
    values = values_of(opened(tmp_path / "b"), 0, vocabulary(tmp_path / "b", 0))
    assert rows_of(splits).ids[:, 0].tolist() == [1 + int(v) % 3 for v in values]


def test_what_is_no_integer_is_named_with_its_row(tmp_path):
    rows = [(7, 1, "a")] * 90 + [("x7", 1, "a")] * 9
    why = "clicks.csv row 91 column 'item' holds 'x7', no 64"
    with pytest.raises(ValueError, match=why):
        opened(tmp_path, rows, hashed=("item",), valid=str(tmp_path / "clicks.csv"))


def test_shared_columns_have_one_vocabulary_and_one_table(tmp_path):
    splits = opened(tmp_path / "a", share=("last=item",))
    schema = splits.train.schema
    assert schema.vocab_sizes == (8, 8)  # 0 to 6, of both
    assert schema.owners == ("item", "item") and schema.tables == (0, 0)
    assert list(splits.identity["vocabulary"]) == ["item"]
    text, alone = vocabulary(tmp_path / "a", 0), opened(tmp_path / "b")
    for field in (0, 1):
        want = values_of(alone, field, vocabulary(tmp_path / "b", field))
        assert values_of(splits, field, text) == want


def test_columns_that_share_by_hash_or_as_lists_have_equal_tables(tmp_path):
    rows = [(i % 9, i % 9, "a") for i in range(40)]
    ids = rows_of(opened(tmp_path, rows, encoding="hash", share=("last=item",))).ids
    assert np.array_equal(ids[:, 0], ids[:, 1])
    splits = opened(tmp_path, multi=("tags",), separator="|", share=("tags=item",))
    assert splits.train.schema.vocab_sizes == (9, 8, 9)
    assert splits.train.schema.tables == (0, 1, 0)


TRIPLES = list(itertools.islice(itertools.permutations("abcdefgh", 3), 200))
LISTS = ["|".join(triple) for triple in TRIPLES]


def warning(values, counts=None, rows=None):
    """Returns the warning on values with these counts, 1 each unless given."""
    counts = counts or [1] * len(values)
    ranked = pa.table({"value": pa.array(values, "large_string"), "count": counts})
    rows = sum(counts) if rows is None else rows
    return column_facts("tags", HashEncoder("tags", 9), ranked, rows)["warning"]


@pytest.mark.parametrize("separator", "|,; ")
def test_a_list_in_a_text_is_named_where_half_of_the_rows_hold_one(separator):
    lists = [separator.join(triple) for triple in TRIPLES]
    assert warning(lists).startswith(
        f"tags looks multi-valued: 100% of its rows hold {separator!r}, and 200 values "
        "are made of 8 parts"
    )
    others = [f"x{i}" for i in range(6)]
    half = [1] * 200 + [40] * 5
    assert f"50% of its rows hold {separator!r}" in warning(lists + others[:5], half)
    assert warning(lists + others, [*half, 1]) is None


def test_parts_must_be_half_as_many_as_values():
    pairs = ["|".join(pair) for pair in itertools.permutations("abcdef", 2)]
    assert "12 values are made of 6 parts" in warning(pairs[:11] + ["f|a"], [9] * 12)
    assert warning(pairs[:10] + ["f|a"], [9] * 11) is None


def test_a_row_number_is_named_in_fifty_rows_or_more():
    numbers = [f"r{i}" for i in range(300)]
    assert warning(numbers).startswith("tags has 300 values in 300 rows")
    assert warning(numbers[:50]) and warning(numbers[:49]) is None
    assert warning(numbers[:80], rows=100) and warning(numbers[:79], rows=100) is None
    assert warning(numbers[:90], [3] * 90, rows=100) is None  # lists of three


def facts_of(folder, rows, **options):
    valid = str(folder / "clicks.csv")
    return opened(folder, rows, valid=valid, **options).report["categorical"]


def test_facts_count_rows_and_values(tmp_path):
    rows = [("a", "x", 1)] * 60 + [("b", "", 1)] * 30 + [("rare", "y", 1)]
    facts = facts_of(tmp_path, rows, min_count=2, reserve_rows=5)
    want = {"rows": 1 + 2 + 5, "values": 2, "reserved": 5}
    most = {"most_frequent": [["a", 60], ["b", 30], ["rare", 1]]}
    assert facts["item"] == want | most | {"warning": None}
    assert facts["last"]["most_frequent"] == [["x", 60], ["y", 1]]


def test_hashed_columns_are_counted_in_their_first_block(tmp_path, monkeypatch):
    read_in_small_parts(monkeypatch, block_bytes=1000)
    rows = [(tags, "x", 1) for tags in LISTS]
    facts = facts_of(tmp_path, rows, encoding="hash", hash_buckets=50)
    assert (facts["item"]["rows"], facts["item"]["values"]) == (50, None)
    assert "looks multi-valued" in facts["item"]["warning"]
    (value, count), *others = facts["last"]["most_frequent"]
    assert value == "x" and 50 < count < 100 and not others
