"""CSV and TSV: whatever is quoted or long, every row is read as it stands."""

import csv
import gzip
import io

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loka_jax.data.blocks import BadRows
from loka_jax.data.text import read_text

COLUMNS = ("a", "b", "c")


def read(path, columns=COLUMNS, *, block_bytes=64, max_bad_rows=0, **options):
    """Returns the values of all rows, and the rows' numbers."""
    bad_rows = BadRows(max_bad_rows)
    options = {"delimiter": ",", "block_bytes": block_bytes} | options
    blocks = list(read_text(str(path), columns, bad_rows, **options))
    values = [zip(*b.table.to_pydict().values(), strict=True) for b in blocks]
    rows = [row for part in values for row in part]
    return rows, [int(number) for b in blocks for number in b.rows]


def as_csv(rows, end="\n"):
    escaped = ([value.replace('"', '""') for value in row] for row in rows)
    quoted = [",".join(f'"{value}"' for value in row) for row in escaped]
    return "".join(line + end for line in [",".join(COLUMNS), *quoted])


def put(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    cells=st.lists(st.text('x,"\n\r ü', max_size=6), min_size=3, max_size=60),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    block_bytes=st.integers(60, 120),
    name=st.sampled_from(["a.csv", "a.csv.gz"]),
    last=st.booleans(),
)
@example(list('\n\r\n,\r\n"') * 60, "\n", 60, "a.csv.gz", True)
def test_any_quoted_text_is_read_as_by_the_standard_library(
    tmp_path_factory, cells, end, block_bytes, name, last
):
    rows = list(zip(cells[::3], cells[1::3], cells[2::3], strict=False))
    text = as_csv(rows, end)
    text = text if last else text.removesuffix(end)
    path = put(tmp_path_factory.mktemp("csv") / name, text)
    got, numbers = read(path, block_bytes=block_bytes)
    want = [tuple(row) for row in csv.reader(io.StringIO(text, newline=""))][1:]
    assert [tuple(value or "" for value in row) for row in got] == want
    assert numbers == list(range(1, len(want) + 1))


def test_a_header_may_be_as_long_as_a_block(tmp_path):
    names = [f"column_{i}" for i in range(100_000)]
    line = ",".join(map(str, range(100_000)))
    path = put(tmp_path / "a.csv", f"{','.join(names)}\n{line}\n{line}\n")
    columns = "column_0", "column_99999"
    rows, _ = read(path, columns, block_bytes=1 << 21)
    assert rows == [("0", "99999")] * 2
    with pytest.raises(ValueError, match="row 1 .* is longer than 256 bytes"):
        read(path, columns, block_bytes=256)
    put(path, "x" * 200_000 + ",a,b,c\n1,2,3,4\n")
    with pytest.raises(ValueError, match="a.csv .*first row that cannot be read"):
        read(path, block_bytes=1 << 20)


@pytest.mark.parametrize("row", ['1,2,"3', '"1,2,3'])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_quote_that_is_never_closed_swallows_no_rows(tmp_path, row, count):
    text = "a,b,c\n" + "1,2,3\n" * 5 + row + "\n" + "1,2,3\n" * count
    path = put(tmp_path / "a.csv", text)
    with pytest.raises(ValueError, match="a.csv ends inside of a quoted value"):
        read(path, block_bytes=1000, max_bad_rows=99)
    with pytest.raises(ValueError, match="a.csv"):
        read(path, max_bad_rows=99)


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("at", [0, 7, 1000, 3005])
def test_nul_is_refused_wherever_it_stands(tmp_path, name, at):
    text = "a,b,c\n" + "1,2,3\n" * 500
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


def test_bad_rows_keep_their_numbers_among_quoted_newlines(tmp_path):
    text = "a,b,c\n" + '1,"x\ny",3\n' * 9 + "1,2\n" + '1,"x\ny",3\n' * 3
    rows, numbers = read(put(tmp_path / "a.csv", text), max_bad_rows=1)
    assert len(rows) == 12 and numbers == [*range(1, 10), 11, 12, 13]
