"""CSV, TSV, Parquet, Criteo: what is read, and one sentence for what cannot be."""

import gzip

import chex
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax.data import DataConfig, open_data
from loka_jax.data.blocks import BadRows
from loka_jax.data.files import reader_of
from tests.support.data import HEADER, criteo_line, open_table, rows_of, rows_text
from tests.support.data import write as write_text


def arrow_table(count=100):
    index = np.arange(1, count + 1)
    columns = {"click": index % 2, "price": index, "age": index % 50}
    columns |= {"user": [f"u{i % 7}" for i in index]}
    return pa.table(columns | {"item": [f"i{i % 11}" for i in index]})


def parquet_bytes(table, **options):
    sink = pa.BufferOutputStream()
    parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


def opened(folder, name, content, **options):
    content = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(content)
    return open_table(folder / name, **options)


def test_every_format_gives_the_same_examples(tmp_path):
    text, table = HEADER + rows_text(100), arrow_table()
    tabs = text.replace(",", "\t")
    mixed = table.append_column("extra", pa.array([[1]] * 100))
    mixed = mixed.select(["extra", "item", "user", "age", "click", "price"])
    files = {
        "a.tsv": tabs.encode(),
        "c.CSV": text.replace("\n", "\r\n").encode(),
        "d.csv": b"\xef\xbb\xbf" + text.encode(),
        "a.parquet": parquet_bytes(table),
        "b.pq": parquet_bytes(mixed),
    }
    want = rows_of(opened(tmp_path, "a.csv", text))
    assert len(want.labels) > 50
    for name, content in files.items():
        chex.assert_trees_all_equal(rows_of(opened(tmp_path, name, content)), want)


PAGE = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}


def flipped(content):
    return content[:3000] + bytes([content[3000] ^ 1]) + content[3001:]


TABLE = parquet_bytes(arrow_table())
PAGES = flipped(parquet_bytes(arrow_table(5000), **PAGE))
TEXT = HEADER + rows_text(9)
TWICE = "click,price,age,user,user,item\n1,2,3,4,5,6\n"
FOUND = ", only click, price, age, user, item"


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.csv", "\n\n", {}, "a.csv is empty"),
        ("a.tsv.gz", gzip.compress(b"", mtime=0), {}, "a.tsv.gz is empty"),
        ("a.csv", HEADER.strip(), {}, "no rows"),
        ("a.parquet", "", {}, r"a.parquet is empty \(0 bytes\)"),
        ("a.parquet", TABLE[: len(TABLE) // 2], {}, "cannot be read: it is not a com"),
        ("a.parquet", PAGES, {}, "a page does not match its checksum"),
        ("a.csv.gz", TEXT, {}, "a.csv.gz cannot be read: it is not a gzip"),
        (
            "a.csv",
            10 * TEXT.encode() + b"1,2,3,\xff,i\n",
            {},
            "row 100 is not UTF-8 text",
        ),
        ("a.parquet.gz", TEXT, {}, "must end in one of"),
        ("a.dat", TEXT, {}, "must end in one of .csv, .tsv, .*.parquet"),
        ("a.csv", TWICE, {}, "column 'user' 2 times"),
        ("a.csv", TEXT + "1,2,3\n", {}, "row 10 has 3 columns, expected 5.*max-bad"),
        ("a.csv", TEXT, {"label": "clock"}, f"no column 'clock'{FOUND}"),
        ("a.parquet", TABLE, {"dense": ("x",)}, f"no column 'x'{FOUND}"),
        ("a.csv", ",".join("abcdefghijklmno") + "\n", {}, "only a, .*, l and 3 more:"),
    ],
)
def test_what_is_no_table_is_named(tmp_path, name, content, options, message):
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, name, content, **options)


def test_allowed_bad_rows_are_left_out_counted_and_kept_as_samples(tmp_path):
    text = HEADER + rows_text(9) + "1,2,3\n\n" + rows_text(90) + "1,2,3,4,5,6\n" * 5
    splits = opened(tmp_path, "a.csv", text, max_bad_rows=6)
    assert sum(splits.report["examples"].values()) == 99
    rows = [(10, 3), *((row, 6) for row in range(101, 105))]
    samples = [
        {"file": "a.csv", "row": row, "columns": columns, "expected": 5}
        for row, columns in rows
    ]
    assert splits.report["bad_rows"] == {"count": 6, "samples": samples}
    with pytest.raises(ValueError, match="row 105 has 6 col.*6 bad rows are more than"):
        opened(tmp_path, "a.csv", text, max_bad_rows=5)


# Criteo has 40 columns and no header.


def open_criteo(path, **options):
    cache = str(path.parent / "cache")
    config = DataConfig(kind="criteo", path=str(path), cache=cache, **options)
    return open_data(config, seed=0)


MANY = "".join(criteo_line(str(i % 2), {1: str(i)}, {1: '"abc'}) for i in range(60))


def test_columns_are_those_of_criteo_plain_and_packed(tmp_path):
    write_text(tmp_path / "day_0", MANY)
    (tmp_path / "b.gz").write_bytes(gzip.compress(MANY.encode()))
    plain, packed = (open_criteo(tmp_path / name) for name in ("day_0", "b.gz"))
    schema = plain.train.schema
    assert schema.dense == tuple(f"I{i}" for i in range(1, 14))
    assert schema.categorical == tuple(f"C{i}" for i in range(1, 27))
    chex.assert_trees_all_equal(rows_of(plain), rows_of(packed))
    assert sum(plain.report["examples"].values()) == 60  # quotes mean nothing
    # Criteo's own test.txt lacks the label, which predictions do not need.
    unlabelled = "".join(line.split("\t", 1)[1] for line in MANY.splitlines(True))
    path = write_text(tmp_path / "test.txt", unlabelled)
    names, read = ("I1", "C26"), reader_of(DataConfig(kind="criteo"), tmp_path)
    found, want = (
        [b.table for b in read(file, names, BadRows(0))]
        for file in (path, str(tmp_path / "day_0"))
    )
    assert pa.concat_tables(found) == pa.concat_tables(want)
    with pytest.raises(ValueError, match="test.txt has no column 'label', only I1"):
        open_criteo(tmp_path / "test.txt")
    write_text(tmp_path / "day_0", MANY + criteo_line("1", {3: "x"}))
    with pytest.raises(ValueError, match="day_0 row 61 column 'I3' holds 'x'"):
        open_criteo(tmp_path / "day_0")
