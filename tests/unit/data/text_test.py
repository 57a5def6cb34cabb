"""CSV and TSV: whatever is quoted or long, every row is read as it stands."""

import csv
import gzip
import io
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka_jax.data.blocks import BadRows
from loka_jax.data.text import read_text
from tests.support.data import criteo_line

COLUMNS = ("a", "b", "c")


def read(path, columns=COLUMNS, *, block_bytes=64, max_bad_rows=0, **options):
    """Returns the values of all rows, and the rows' numbers."""
    bad_rows = BadRows(max_bad_rows)
    options = {"delimiter": ","} | options
    blocks = list(
        read_text(str(path), columns, bad_rows, block_bytes=block_bytes, **options)
    )
    rows = [
        row for b in blocks for row in zip(*b.table.to_pydict().values(), strict=True)
    ]
    return rows, [int(number) for b in blocks for number in b.rows]


def quoted(value):
    escaped = value.replace('"', '""')
    return f'"{escaped}"'


def as_csv(rows, end="\n", header=COLUMNS):
    lines = [",".join(header), *(",".join(map(quoted, row)) for row in rows)]
    return "".join(line + end for line in lines)


def put(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("block_bytes", [40, 41, 42, 43, 57, 64, 1000])
def test_newlines_in_quotes_are_read_at_every_block_edge(tmp_path, name, block_bytes):
    rows = [(str(i), f"line\n{i},\r\n", f'"{i}"\n') for i in range(40)]
    path = put(tmp_path / name, as_csv(rows))
    assert read(path, block_bytes=block_bytes) == (rows, list(range(1, 41)))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    cells=st.lists(st.text('x,"\n\r ü', max_size=6), min_size=3, max_size=60),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    block_bytes=st.integers(60, 120),
)
def test_any_quoted_text_is_read_as_by_the_standard_library(
    tmp_path_factory, cells, end, block_bytes
):
    rows = list(zip(cells[::3], cells[1::3], cells[2::3], strict=False))
    path = put(tmp_path_factory.mktemp("csv") / "a.csv", as_csv(rows, end))
    got, _ = read(path, block_bytes=block_bytes)
    want = list(csv.reader(io.StringIO(path.read_bytes().decode(), newline="")))[1:]
    assert [tuple(value or "" for value in row) for row in got] == list(
        map(tuple, want)
    )


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
def test_every_line_end_is_one(tmp_path, end, last):
    text = ("a,b,c\n" + "1,2,3\n" * 50).replace("\n", end)
    path = put(tmp_path / "a.csv", text if last else text.removesuffix(end))
    assert read(path) == ([("1", "2", "3")] * 50, list(range(1, 51)))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_criteo_lines_may_end_in_any_way(tmp_path, end):
    names = tuple(f"c{i}" for i in range(40))
    path = put(tmp_path / "a.txt", criteo_line().replace("\n", end) * 9)
    rows, _ = read(path, names, names=names, delimiter="\t", block_bytes=1000)
    assert len(rows) == 9


def test_quotes_are_plain_text_in_files_without_header(tmp_path):
    path = put(tmp_path / "a.txt", '1,"x,3\n' * 20 + '1,2,"\n')
    rows, _ = read(path, names=COLUMNS)
    assert rows == [("1", '"x', "3")] * 20 + [("1", "2", '"')]


def test_a_header_may_be_as_long_as_a_block(tmp_path):
    names = [f"column_{i}" for i in range(100_000)]
    line = ",".join(map(str, range(100_000)))
    path = put(tmp_path / "a.csv", f"{','.join(names)}\n{line}\n{line}\n")
    rows, _ = read(path, ("column_0", "column_99999"), block_bytes=1 << 21)
    assert rows == [("0", "99999")] * 2


@pytest.mark.parametrize("tail", ["\n1,2\n", "\n", ""])
def test_a_longer_header_is_told(tmp_path, tail):
    path = put(tmp_path / "a.csv", ",".join(f"column_{i}" for i in range(99)) + tail)
    with pytest.raises(ValueError, match="a.csv row 1 .* is longer than 256 bytes"):
        read(path, ("column_98",), block_bytes=256)


def test_a_row_longer_than_a_block_is_told(tmp_path):
    path = put(tmp_path / "a.csv", "a,b,c\n" + "1,2,3\n" * 50 + f"1,{'x' * 200},3\n")
    with pytest.raises(ValueError, match=r"row \d+ or one after it is longer than 64"):
        read(path)
    assert len(read(path, block_bytes=512)[0]) == 51


@pytest.mark.parametrize("row", ['1,2,"3', '1,"2,3', '"1,2,3'])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_quote_that_is_never_closed_swallows_no_rows(tmp_path, row, count):
    text = "a,b,c\n" + "1,2,3\n" * 5 + row + "\n" + "1,2,3\n" * count
    path = put(tmp_path / "a.csv", text)
    with pytest.raises(ValueError, match="a.csv ends inside of a quoted value"):
        read(path, block_bytes=1000, max_bad_rows=99)
    with pytest.raises(ValueError, match="a.csv"):
        read(path, max_bad_rows=99)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("at", [0, 7, 1000, -1])
def test_nul_is_refused_wherever_it_stands(tmp_path, name, at):
    text = "a,b,c\n" + "1,2,3\n" * 500
    at %= len(text)
    path = put(tmp_path / name, text[:at] + "\0" + text[at:])
    with pytest.raises(ValueError, match=rf"is not UTF-8 text \(its byte {at + 1:,} "):
        read(path, ("a",))


def test_damage_behind_the_first_block_is_told(tmp_path):
    path = tmp_path / "a.csv.gz"
    random = np.random.default_rng(0).integers(10, size=(20_000, 3))
    put(path, as_csv(random.astype(str).tolist()))
    whole = path.read_bytes()
    for content in (whole[:-9], whole[:-1], whole[:-8] + bytes(8), whole + b"junk"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="a.csv.gz cannot be read: it is"):
            read(path, block_bytes=1 << 12)


def test_gzip_in_several_parts_is_read_whole(tmp_path):
    parts = [b"a,b,c\n", b"1,2,3\n" * 40, b"4,5,6\n"]
    (tmp_path / "a.csv.gz").write_bytes(b"".join(map(gzip.compress, parts)))
    rows, _ = read(tmp_path / "a.csv.gz")
    assert rows == [("1", "2", "3")] * 40 + [("4", "5", "6")]


def test_bad_rows_keep_their_numbers_among_quoted_newlines(tmp_path):
    text = "a,b,c\n" + '1,"x\ny",3\n' * 9 + "1,2\n" + '1,"x\ny",3\n' * 3
    rows, numbers = read(put(tmp_path / "a.csv", text), max_bad_rows=1)
    assert len(rows) == 12 and numbers == [*range(1, 10), 11, 12, 13]


def test_reading_may_stop_early(tmp_path, monkeypatch):
    opened = []

    def spy(*arguments):
        opened.append(open(*arguments))
        return opened[-1]

    monkeypatch.setattr("loka_jax.data.text.open", spy, raising=False)
    path = put(tmp_path / "a.csv", "a,b,c\n" + "1,2,3\n" * 5000)
    hook = sys.unraisablehook
    for _ in range(50):
        blocks = read_text(
            str(path), COLUMNS, BadRows(0), delimiter=",", block_bytes=64
        )
        assert next(blocks).rows[0] == 1
        assert not opened[-1].closed
        blocks.close()
        assert opened[-1].closed and sys.unraisablehook is hook
    assert len(opened) == 50


def test_one_column_is_enough(tmp_path):
    path = put(tmp_path / "a.csv", "a\n" + "1\n" * 50)
    assert read(path, ("a",))[0] == [("1",)] * 50


def test_a_first_row_that_is_no_header_is_told(tmp_path):
    path = put(tmp_path / "a.csv", "a" * 200_000 + ",b\n1,2\n")
    with pytest.raises(ValueError, match="a.csv has a first row that cannot be read"):
        read(path, ("b",), block_bytes=1 << 20)
