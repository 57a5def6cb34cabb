"""A value has one id whatever type it arrives in, or is refused."""

import datetime
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import csv, parquet

from loka_jax.data.blocks import BadRows, Block
from loka_jax.data.open import open_data
from loka_jax.data.saved_encoding import load_encoding
from loka_jax.data.shards import open_shards
from loka_jax.data.table import reader
from loka_jax.data.values import Counts
from tests.support.data import table_config

IDS = pa.array([7, 30, None, 7, 2**53 - 1] * 40)
SMALL = pa.array([7, 30, None, 7, 11] * 40)
TIMES = [datetime.datetime(2026, 1, day) for day in (1, 2, 3, 4, 5)] * 40


def one_column(folder, values, *, name="a.parquet", **options):
    """Returns the encoding that is learned of a column."""
    click = pa.array([i % 2 for i in range(len(values))])
    put(folder / name, pa.table({"click": click, "c": values}))
    columns = {"dense": (), "categorical": ("c",)} | options
    return open_data(table_config(folder / name, **columns), seed=0).folder


def put(path, table):
    write = parquet.write_table if path.suffix == ".parquet" else csv.write_csv
    write(table, path)


def ids_of(folder, path):
    encoding, counts = load_encoding(folder), Counts()
    blocks = list(reader(path)(str(path), ("c",), BadRows(0)))
    records = encoding.records(blocks, counts, with_labels=False)
    return records["ids"][:, 0].tolist(), counts


def arrived(folder, values):
    """Returns the ids of values of a Parquet file."""
    put(folder / "new.parquet", pa.table({"c": values}))
    return ids_of(folder_of(folder), folder / "new.parquet")[0]


def folder_of(folder):
    (path,) = pathlib.Path(folder / "cache").iterdir()
    return open_shards(path)


def decimals(scale):
    return SMALL.cast(pa.decimal128(30, scale))


SAME = [
    SMALL.cast(pa.uint8()),
    SMALL.cast(pa.float64()),
    SMALL.cast(pa.large_string()),
    SMALL.cast(pa.string()).cast(pa.string_view()),
    pa.array([v and f"{v}.0" for v in SMALL.to_pylist()]),  # a float in a CSV file
    SMALL.dictionary_encode(),
    SMALL.cast(pa.float64()).dictionary_encode(),
    SMALL.cast(pa.string()).dictionary_encode(),
    decimals(0),
]
REFUSED = [
    decimals(2),
    SMALL.cast(pa.float32()),
    SMALL.cast(pa.string()).cast(pa.binary()),
    pa.array([v == 7 for v in SMALL.to_pylist()]),
    SMALL.cast(pa.timestamp("us")),
]


@pytest.mark.parametrize("options", [{}, {"encoding": "hash", "hash_buckets": 999}])
@pytest.mark.parametrize("trained", SAME, ids=lambda x: str(x.type))
def test_whole_numbers_have_the_ids_that_they_were_trained_with(
    tmp_path, trained, options
):
    one_column(tmp_path, trained, **options)
    want = arrived(tmp_path, trained)
    assert want[2] == 0 and len(set(want)) == 4
    for values in SAME:
        assert arrived(tmp_path, values) == want, values.type
    for values in REFUSED:
        with pytest.raises(ValueError, match="'c' holds .*and the training rows text"):
            arrived(tmp_path, values)
    assert arrived(tmp_path, pa.nulls(3)) == [0, 0, 0]


@pytest.mark.parametrize(
    ("trained", "other"),
    [
        *((values, SMALL.cast(pa.string())) for values in REFUSED),
        (REFUSED[3], pa.array(["True", "False"] * 100)),
        (pa.array(TIMES, pa.timestamp("us")), pa.array(TIMES, pa.timestamp("ns"))),
        (decimals(2), decimals(3)),
    ],
    ids=lambda x: str(x.type),
)
def test_other_types_have_ids_of_their_own(tmp_path, trained, other):
    one_column(tmp_path, trained)
    want = arrived(tmp_path, trained)
    assert 0 < min(set(want) - {0})
    assert arrived(tmp_path, trained.dictionary_encode()) == want
    with pytest.raises(ValueError, match="new.parquet column 'c' holds .*: convert it"):
        arrived(tmp_path, other)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([7.0, 2.0**53]),
        pa.array([7.0, -(2.0**60)]).dictionary_encode(),
        pa.array(["7", "9007199254740992.0"]),  # as pandas writes them to CSV files
        pa.array(["7", "1.152921504606847e+18"]),
    ],
    ids=str,
)
def test_a_float_holds_no_large_id(tmp_path, values):
    one_column(tmp_path, IDS)
    assert arrived(tmp_path, pc.cast(IDS, pa.float64())) == arrived(tmp_path, IDS)
    with pytest.raises(ValueError, match="column 'c' holds .*hold an id.*: write int"):
        arrived(tmp_path, values)
    with pytest.raises(ValueError, match="holds 16777216 as float, .* of 2.24 or more"):
        one_column(
            tmp_path, pa.array([1, 2.0**24] * 20, pa.float32()), name="b.parquet"
        )


NULLS = ["\\N", "NULL", "null", "NA", "a"] * 40


@pytest.mark.parametrize("options", [{}, {"encoding": "hash", "hash_buckets": 999}])
def test_null_is_missing_in_a_column_of_any_kind(tmp_path, options):
    table = pa.table({"click": [0, 1] * 100, "c": NULLS, "x": NULLS[:4] * 50})
    put(tmp_path / "a.csv", table)
    columns = {"dense": ("x",), "categorical": ("c",)}
    config = table_config(tmp_path / "a.csv", **columns, **options)
    report = open_data(config, seed=0).report
    counts = [split["columns"]["c"]["missing"] for split in report["splits"].values()]
    assert sum(counts) == 120 and report["totals"]["missing"] == 120 + 200
    lists = {"multi": ("c",), "separator": "|", "categorical": (), "dense": ()}
    splits = open_data(table_config(tmp_path / "a.csv", **lists), seed=0)
    assert splits.report["totals"]["missing"] == 120 and splits.train.schema.slots == (
        1,
    )


def test_an_encoding_of_an_earlier_version_keeps_its_ids(tmp_path):
    """It has no `forms`: NULL is a value of a hash, and any type is taken."""
    folder = one_column(tmp_path, pa.array(NULLS), encoding="hash", hash_buckets=999)
    folder.settings.pop("forms")
    values = pa.array(["NULL", "\\N", "7.0", "7", "a"])
    put(tmp_path / "new.parquet", pa.table({"c": values}))
    found, _ = ids_of(folder, tmp_path / "new.parquet")
    assert found == [518, 987, 712, 707, 390]
    put(tmp_path / "new.parquet", pa.table({"c": [True, False]}))
    assert len(ids_of(folder, tmp_path / "new.parquet")[0]) == 2


@pytest.mark.parametrize(
    ("values", "count"), [(["x", "y"], 1), (["x", "x"], 0), (["x", "a", "y"], 0)]
)
def test_a_column_of_nothing_but_unknown_values_is_named(tmp_path, values, count):
    folder = one_column(tmp_path, pa.array(NULLS))
    put(tmp_path / "new.parquet", pa.table({"c": values}))
    said = ids_of(folder, tmp_path / "new.parquet")[1].warnings("the rows")
    assert len(said) == count and all("no value of column 'c'" in x for x in said)


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a", "b"])
        .dictionary_encode()
        .cast(pa.dictionary(pa.int64(), pa.large_string())),
        pc.run_end_encode(pa.array(["a", "b"])),
        pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", "b"], pa.string_view())),
        pa.array(["a", "b"], pa.string_view()),
    ],
    ids=lambda x: str(x.type),
)
def test_a_block_gives_columns_in_plain_types(values):
    block = Block(pa.table({"c": values}), np.arange(2), "logs")
    assert block.column("c").to_pylist() == ["a", "b"]
    assert not pa.types.is_nested(block.column("c").type)
