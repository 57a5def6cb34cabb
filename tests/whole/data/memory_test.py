"""Memory is bounded by bytes: a small file may hold far more than fits it.

Peaks of whole conversions: tests/whole/data/conversion_test.py.
"""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data.blocks import BadRows
from loka_jax.data.parquet import read_parquet
from tests.support.data import HEADER, open_table, write


def blocks(path, *columns, block_bytes):
    return list(read_parquet(str(path), columns, BadRows(0), block_bytes=block_bytes))


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_blocks_of_parquet_are_bounded_by_the_text_they_hold(tmp_path, use_dictionary):
    path = tmp_path / "a.parquet"
    table = pa.table({"label": np.arange(2000) % 2, "c": ["x" * 20_000] * 2000})
    options = {"use_dictionary": use_dictionary, "compression": "zstd"}
    parquet.write_table(table, path, **options)
    got = blocks(path, "label", "c", block_bytes=100_000)
    assert max(block.nbytes for block in got) < 110_000
    assert np.array_equal(np.concatenate([b.rows for b in got]), np.arange(2000) + 1)
    assert sum(b.table["label"].to_numpy().sum() for b in got) == 1000


@pytest.mark.parametrize(("block_bytes", "most_rows"), [(12_000, 9), (10, 1)])
def test_missing_and_short_cells_among_long_ones_stay_in_order(
    tmp_path, block_bytes, most_rows
):
    cells = [None, "", "a" * 5000, None, "b", "a" * 5000, "c" * 900] * 40
    table = pa.table({"c": cells, "d": [None] * 280})
    parquet.write_table(table, tmp_path / "a.parquet")
    got = blocks(tmp_path / "a.parquet", "c", "d", block_bytes=block_bytes)
    assert max(block.table.num_rows for block in got) <= most_rows
    assert [cell for block in got for cell in block.table["c"].to_pylist()] == cells


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
