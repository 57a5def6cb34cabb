"""Tables by column: hash sizes, integers hashed before, and shared vocabularies."""

import io

import chex
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from rich.console import Console

from loka_jax.data import DataConfig, open_data
from loka_jax.data.encoding import ModuloEncoder, NoInteger
from loka_jax.data.saved_encoding import load_encoding
from loka_jax.data.shards import open_shards
from loka_jax.train.logs.column_table import print_columns
from tests.support.data import open_table, rows_of, write

HEADER = "click,item,last,tags\n"
COLUMNS = {"dense": (), "categorical": ("item", "last")}


def csv_of(folder, count=60):
    rows = (f"{i % 2},{i % 5},{i % 7},{i % 3}|{i % 8}\n" for i in range(count))
    return write(folder / "clicks.csv", HEADER + "".join(rows))


def opened(folder, **options):
    return open_table(csv_of(folder), **(COLUMNS | options))


def values_of(splits, field, text):
    """Returns the values of a field's training ids."""
    ids = rows_of(splits).ids[:, field]
    return np.array([None, *text])[ids].tolist()


def test_a_hash_size_is_of_its_column(tmp_path):
    splits = opened(tmp_path, hash_sizes=("last=12",))
    assert splits.train.schema.vocab_sizes == (6, 12)
    assert rows_of(splits).ids[:, 1].min() > 0
    both = opened(tmp_path, hash_sizes=("last=12",), encoding="hash", hash_buckets=9)
    assert both.train.schema.vocab_sizes == (9, 12)
    assert np.array_equal(rows_of(both).ids[:, 1], rows_of(splits).ids[:, 1])


def test_hashed_integers_are_taken_modulo(tmp_path):
    splits = opened(tmp_path, hashed=("item",), hash_sizes=("item=4",))
    assert splits.train.schema.vocab_sizes == (4, 8)
    plain = opened(tmp_path)
    values = values_of(plain, 0, vocabulary(tmp_path, 0))
    assert rows_of(splits).ids[:, 0].tolist() == [1 + int(v) % 3 for v in values]


def vocabulary(folder, field):
    for path in sorted((folder / "cache").glob("*/vocabulary-*.parquet")):
        if path.name == f"vocabulary-{field:02d}.parquet":
            return parquet.read_table(path)["value"].to_pylist()
    raise AssertionError(field)


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.large_string()])
def test_the_same_bits_have_the_same_id(kind):
    bits = np.array([0, 5, 2**63 - 1, 2**63, 2**64 - 3], np.uint64)
    numbers = pa.array(bits if kind != pa.int64() else bits.view(np.int64))
    text = pa.array([str(v) for v in numbers.to_pylist()] + [None], pa.large_string())
    want = [1 + int(v) % 99 for v in bits] + [0]
    ids = ModuloEncoder(100).encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == want
    assert ModuloEncoder(100).encode(text[:2]).tolist() == want[:2]


@pytest.mark.parametrize("others", [[], [str(2**64 - 3)]])
def test_hexadecimal_numbers_are_integers(others):
    text = pa.array(["0x1F", "0XFFFFFFFFFFFFFFFF", *others], pa.large_string())
    want = [1 + v % 99 for v in (31, 2**64 - 1, *map(int, others))]
    assert ModuloEncoder(100).encode(text).tolist() == want


@pytest.mark.parametrize(
    "bad", ["0x1_0", "-0x1", "0x", "1.5", "abc", "1_0", str(2**64), str(-(2**63) - 1)]
)
def test_what_is_no_integer_has_a_place(bad):
    with pytest.raises(NoInteger) as error:
        ModuloEncoder(9).encode(pa.array(["1", None, bad, bad], pa.large_string()))
    assert error.value.at == 2


def test_what_is_no_integer_is_named_with_its_row(tmp_path):
    path = write(tmp_path / "c.csv", HEADER + "1,7,1,a\n0,x7,1,a\n" * 20)
    with pytest.raises(ValueError, match="c.csv row 2 column 'item' holds 'x7', no 64"):
        open_table(path, hashed=("item",), **COLUMNS)


def test_shared_columns_have_one_vocabulary_and_one_table(tmp_path):
    splits = opened(tmp_path, share=("last=item",))
    schema = splits.train.schema
    assert schema.vocab_sizes == (8, 8)  # 0 to 6, of both
    assert schema.owners == ("item", "item") and schema.tables == (0, 0)
    assert list(splits.identity["vocabulary"]) == ["item"]
    text = vocabulary(tmp_path, 0)
    (tmp_path / "a").mkdir()
    alone = opened(tmp_path / "a")
    for field in (0, 1):
        want = values_of(alone, field, vocabulary(tmp_path / "a", field))
        assert values_of(splits, field, text) == want


def test_a_shared_table_is_counted_once(tmp_path):
    splits, out = opened(tmp_path, share=("last=item",)), io.StringIO()
    dims = dict.fromkeys(splits.report["categorical"], 4)
    print_columns(Console(file=out, width=120), splits.report, dims)
    assert splits.report["categorical"]["last"]["table_of"] == "item"
    assert "8 rows x 4 = 32 parameters in tables" in out.getvalue()
    assert "shared" in out.getvalue()


def test_a_list_shares_a_table(tmp_path):
    options = {"multi": ("tags",), "separator": "|", "share": ("tags=item",)}
    splits = opened(tmp_path, **options)
    assert splits.train.schema.vocab_sizes == (9, 8, 9)
    assert splits.train.schema.tables == (0, 1, 0)


def test_hashed_columns_that_share_have_equal_ids(tmp_path):
    path = write(tmp_path / "c.csv", HEADER + "1,7,7,a\n0,9,9,a\n" * 20)
    options = {"encoding": "hash", "share": ("last=item",)}
    ids = rows_of(open_table(path, **(COLUMNS | options))).ids
    assert np.array_equal(ids[:, 0], ids[:, 1])


@pytest.mark.parametrize(
    "options",
    [
        {"share": ("last=item",)},
        {"hash_sizes": ("last=12",)},
        {"hashed": ("item",)},
        {"multi": ("tags",), "separator": "|", "share": ("tags=item",)},
    ],
    ids=str,
)
def test_a_saved_encoding_encodes_alike(tmp_path, options):
    splits = opened(tmp_path, **options)
    (folder,) = (tmp_path / "cache").iterdir()
    found = load_encoding(open_shards(folder))
    assert found.schema == splits.train.schema
    valid = open_data(DataConfig(kind="table", path=str(folder)), seed=0).valid
    assert valid.schema == found.schema
    again = opened(tmp_path, **options, cache=str(tmp_path / "other"))
    chex.assert_trees_all_equal(rows_of(again, "valid"), rows_of(splits, "valid"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hash_sizes": ("c=1",)}, "must give the column 2 to"),
        ({"hash_sizes": ("c=many",)}, "must give the column 2 to"),
        ({"hash_sizes": ("x=9",)}, "the columns are c, d"),
        ({"hashed": ("x",)}, "--data.hashed 'x' is not among"),
        ({"share": ("c=x",)}, "--data.share c=x must name a column"),
        ({"share": ("c=d", "d=c")}, "with a table of its own"),
        ({"share": ("c=c",)}, "with a table of its own"),
        ({"share": ("c=d",), "hashed": ("c",)}, "'c' uses the table of 'd'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, why):
    with pytest.raises(ValueError, match=why):
        DataConfig(kind="table", categorical=("c", "d"), **options)
