"""Memory is bounded by bytes: a small file may hold far more than fits it."""

import gzip
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data.blocks import BadRows
from loka_jax.data.parquet import read_parquet
from tests.support.data import HEADER, open_table, write

LIMIT = 2 << 30

CONVERT = """
import pathlib, sys
from loka_jax.data import DataConfig, open_data
path, cache, dense, categorical = sys.argv[1:]
columns = {"dense": dense.split(), "categorical": categorical.split()}
columns = {kind: tuple(names) for kind, names in columns.items()}
config = DataConfig(kind="table", path=path, cache=cache, **columns)
open_data(config, seed=0)
status = pathlib.Path("/proc/self/status").read_text()
print(int(status.partition("VmHWM:")[2].split()[0]) * 1024)
"""


def peak_memory(path, *, dense="", categorical=""):
    """Returns the peak of a process that converts the file, in bytes."""
    command = [sys.executable, "-c", CONVERT, path, path.parent / "cache"]
    result = subprocess.run(
        [*map(str, command), dense, categorical],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def labels(count):
    return np.arange(count) % 2


def repeated(value, count):
    indices = pa.array(np.zeros(count, np.int32))
    return pa.DictionaryArray.from_arrays(indices, pa.array([value]))


def long_cells(path, *, size, count, **options):
    table = {"label": labels(count), "c": repeated("x" * size, count)}
    parquet.write_table(pa.table(table), path, **options)


def plain_cells(path):
    """Writes equal cells one by one, which only compression makes small."""
    cells = repeated("x" * 20_000, 10_000).dictionary_decode()
    table = pa.table({"label": labels(10_000), "c": cells})
    options = {"use_dictionary": False, "compression": "zstd"}
    with parquet.ParquetWriter(path, table.schema, **options) as file:
        for _ in range(15):
            file.write_table(table)


def many_columns(path):
    columns = {f"c{i}": np.zeros(150_000, np.int8) for i in range(1000)}
    parquet.write_table(pa.table({"label": labels(150_000)} | columns), path)


def long_text(path):
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("label,c\n")
        for i in range(60_000):
            file.write(f"{i % 2},{'x' * 20_000}\n")


def short_rows(path):
    path.write_text("label,c\n" + "0,\n1,\n" * 6_000_000)


CASES = {
    "equal long cells": (
        "a.parquet",
        lambda p: long_cells(p, size=20_000, count=200_000),
    ),
    "equal huge cells": (
        "a.parquet",
        lambda p: long_cells(p, size=4_000_000, count=1000),
    ),
    "plain long cells": ("a.parquet", plain_cells),
    "long text": ("a.csv.gz", long_text),
    "short rows": ("a.csv", short_rows),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_conversion_stays_below_two_gigabytes(tmp_path, case):
    name, make = CASES[case]
    make(tmp_path / name)
    assert peak_memory(tmp_path / name, categorical="c") < LIMIT


@pytest.mark.slow
def test_many_columns_stay_below_two_gigabytes(tmp_path):
    many_columns(tmp_path / "a.parquet")
    dense = " ".join(f"c{i}" for i in range(1000))
    assert peak_memory(tmp_path / "a.parquet", dense=dense) < LIMIT


def blocks(path, *columns, block_bytes):
    return list(read_parquet(str(path), columns, BadRows(0), block_bytes=block_bytes))


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_blocks_of_parquet_are_bounded_by_the_text_they_hold(tmp_path, use_dictionary):
    path = tmp_path / "a.parquet"
    options = {"use_dictionary": use_dictionary, "compression": "zstd"}
    long_cells(path, size=20_000, count=2000, **options)
    got = blocks(path, "label", "c", block_bytes=100_000)
    assert max(block.nbytes for block in got) < 110_000
    assert np.array_equal(np.concatenate([b.rows for b in got]), np.arange(2000) + 1)
    assert sum(b.table["label"].to_numpy().sum() for b in got) == 1000


def test_a_row_larger_than_a_block_is_one(tmp_path):
    long_cells(tmp_path / "a.parquet", size=1000, count=9)
    got = blocks(tmp_path / "a.parquet", "c", block_bytes=10)
    assert [block.table.num_rows for block in got] == [1] * 9
    assert got[4].table["c"].to_pylist() == ["x" * 1000]


def test_missing_and_short_cells_among_long_ones_stay_in_order(tmp_path):
    cells = [None, "", "a" * 5000, None, "b", "a" * 5000, "c" * 900] * 40
    parquet.write_table(
        pa.table({"c": cells, "d": [None] * 280}), tmp_path / "a.parquet"
    )
    got = blocks(tmp_path / "a.parquet", "c", "d", block_bytes=12_000)
    assert len(got) > 30
    assert [cell for block in got for cell in block.table["c"].to_pylist()] == cells


def test_columns_without_bytes_count_as_numbers(tmp_path):
    columns = {f"c{i}": pa.nulls(5000) for i in range(10)}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    got = blocks(tmp_path / "a.parquet", *columns, block_bytes=80_000)
    assert max(block.table.num_rows for block in got) <= 1000


def test_vocabularies_larger_than_half_the_memory_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr("loka_jax.data.learn.memory_bytes", lambda: 100_000)
    monkeypatch.setattr("loka_jax.data.learn.MERGE_BYTES", 1000)
    lines = (f"{i % 2},1,2,{i}{'x' * 200},i\n" for i in range(1000))
    path = write(tmp_path / "a.csv", HEADER + "".join(lines))
    message = "most of them in 'user', and 50,000 are allowed.*--data.encoding hash"
    with pytest.raises(ValueError, match=message):
        open_table(path)
    assert open_table(path, encoding="hash").train.num_examples


def test_large_files_are_read_in_parts_to_the_same_rows(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    index = np.arange(20_000)
    table = pa.table({"a": index, "b": [str(i) for i in index]})
    parquet.write_table(table, path, data_page_size=500, write_page_checksum=True)
    monkeypatch.setattr("loka_jax.data.parquet.MAX_WHOLE_BYTES", 100)
    got = pa.concat_tables(b.table for b in blocks(path, "a", "b", block_bytes=10_000))
    assert got.equals(table)
