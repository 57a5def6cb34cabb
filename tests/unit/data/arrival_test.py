"""A value has one id whatever type it arrives in, or is refused."""

import datetime

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import csv, parquet

from loka_jax.data.files import reader_of
from loka_jax.data.open import open_data
from loka_jax.data.records import Encoding
from loka_jax.data.saved_encoding import load_encoding
from loka_jax.data.values import Counts
from tests.support.data import table_config

HASH = {"encoding": "hash", "hash_buckets": 999}
IDS = pa.array([7, 30, None, 7, 2**53 - 1] * 40)
SMALL = pa.array([7, 30, None, 7, 11] * 40)
NULLS = ["\\N", "NULL", "null", "NA", "a"] * 40
DAYS = [datetime.datetime(2026, 1, day) for day in (1, 2, 3, 4, 5)] * 40


def put(path, **columns):
    write = parquet.write_table if path.suffix == ".parquet" else csv.write_csv
    write(pa.table(columns), path)
    return path


def opened(path, values, **options):
    """Returns the splits of a column and labels."""
    put(path, click=[i % 2 for i in range(len(values))], c=values)
    columns = {"dense": (), "categorical": ("c",)} | options
    return open_data(table_config(path, **columns), seed=0)


def arrived(folder, encoding: Encoding, values, counts=None):
    """Returns the ids of values of a Parquet file."""
    path = put(folder / "new.parquet", c=values)
    blocks = list(reader_of(table_config(path), path)(str(path), ("c",), None))
    records = encoding.records(blocks, counts or Counts(), labels="none")
    return records["ids"][:, 0].tolist()


def learned(folder, values, **options):
    return load_encoding(opened(folder / "a.parquet", values, **options).folder)


def decimals(scale):
    return SMALL.cast(pa.decimal128(30, scale))


TEXT = SMALL.cast(pa.string())
FLAGS = pa.array([v == 7 for v in SMALL.to_pylist()])
SAME = [
    SMALL.cast(pa.uint8()),
    SMALL.cast(pa.float64()),
    TEXT.cast(pa.string_view()),
    pa.array([v and f"{v}.0" for v in SMALL.to_pylist()]),  # a float in a CSV file
    SMALL.cast(pa.float64()).dictionary_encode(),
    TEXT.cast(pa.large_string()).dictionary_encode(),
    decimals(0),
]
REFUSED = [
    decimals(2),
    SMALL.cast(pa.float32()),
    TEXT.cast(pa.binary()),
    FLAGS,
    SMALL.cast(pa.timestamp("us")),
]


@pytest.mark.parametrize("options", [{}, HASH], ids=str)
@pytest.mark.parametrize("trained", SAME, ids=lambda x: str(x.type))
def test_whole_numbers_have_one_id_in_every_type(tmp_path, trained, options):
    encoding = learned(tmp_path, trained, **options)
    want = arrived(tmp_path, encoding, trained)
    assert want[2] == 0 and len(set(want)) == 4
    for values in SAME:
        assert arrived(tmp_path, encoding, values) == want, values.type
    for values in REFUSED:
        with pytest.raises(ValueError, match="'c' holds .*and the training rows text"):
            arrived(tmp_path, encoding, values)
    assert arrived(tmp_path, encoding, pa.nulls(3)) == [0, 0, 0]


@pytest.mark.parametrize(
    ("trained", "other"),
    [
        *((values, TEXT) for values in REFUSED),
        (FLAGS, pa.array(["True", "False"])),
        (pa.array(DAYS, pa.timestamp("us")), pa.array(DAYS, pa.timestamp("ns"))),
        (decimals(2), decimals(3)),
    ],
    ids=lambda x: str(x.type),
)
def test_other_types_have_ids_of_their_own(tmp_path, trained, other):
    encoding = learned(tmp_path, trained)
    want = arrived(tmp_path, encoding, trained)
    assert len(set(want)) > 1
    assert arrived(tmp_path, encoding, trained.dictionary_encode()) == want
    with pytest.raises(ValueError, match="new.parquet column 'c' holds .*: convert it"):
        arrived(tmp_path, encoding, other)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([7.0, 2.0**53]),
        pa.array([7.0, -(2.0**60)]).dictionary_encode(),
        pa.array([7.0, 2.0**24], pa.float32()),
        pa.array(["7", "9007199254740992.0"]),  # as pandas writes them to CSV files
        pa.array(["7", "1.152921504606847e+18"]),
    ],
    ids=str,
)
def test_a_float_holds_no_large_id(tmp_path, values):
    encoding = learned(tmp_path, IDS)
    floats = pc.cast(IDS, pa.float64())
    assert arrived(tmp_path, encoding, floats) == arrived(tmp_path, encoding, IDS)
    encoding.forms.clear()  # float32 has a form of its own
    with pytest.raises(ValueError, match="column 'c' holds .*hold an id.*: write int"):
        arrived(tmp_path, encoding, values)


@pytest.mark.parametrize("options", [{}, HASH], ids=str)
def test_null_is_missing_in_a_column_of_any_kind(tmp_path, options):
    totals = opened(tmp_path / "a.csv", NULLS, **options).report["totals"]
    assert totals["missing"] == 120
    lists = {"multi": ("c",), "separator": "|", "categorical": ()}
    splits = opened(tmp_path / "a.csv", NULLS, **lists, **options)
    assert splits.report["totals"]["missing"] == 120
    path = put(tmp_path / "b.csv", click=[0, 1] * 50, c=NULLS[:4] * 25)
    config = table_config(path, dense=("c",), categorical=())
    assert open_data(config, seed=0).report["totals"]["missing"] == 100


@pytest.mark.parametrize(
    ("values", "count"), [(["x", "y"], 1), (["x", "x"], 0), (["x", "a", "y"], 0)]
)
def test_a_column_of_nothing_but_unknown_values_is_named(tmp_path, values, count):
    counts = Counts()
    arrived(tmp_path, learned(tmp_path, NULLS), values, counts)
    said = counts.warnings("the rows")
    assert len(said) == count and all("no value of column 'c'" in x for x in said)
