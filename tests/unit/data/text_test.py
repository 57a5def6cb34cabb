"""CSV and TSV: every line is a row, read as it stands, or refused by its number."""

import csv
import gzip
import io
import re
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from loka_jax.data.blocks import BadRows
from loka_jax.data.parquet import read_parquet
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
    cells=st.lists(st.text('x," ü', max_size=6), min_size=3, max_size=60),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    block_bytes=st.integers(60, 120),
    name=st.sampled_from(["a.csv", "a.csv.gz"]),
    last=st.booleans(),
)
@example(list(',"x') * 60, "\r\n", 60, "a.csv.gz", True)
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
    with pytest.raises(ValueError, match="row 1 is longer than 256 bytes"):
        read(path, columns, block_bytes=256)
    put(path, "x" * 200_000 + ",a,b,c\n1,2,3,4\n")
    with pytest.raises(ValueError, match="a.csv .*first row that cannot be read"):
        read(path, block_bytes=1 << 20)


GOOD = "1,2,3\n"


@pytest.mark.parametrize(
    ("value", "want"),
    [
        ('5" tv', '5" tv'),
        ('"5"" tv, new"', '5" tv, new'),
        ('""', None),
        ("'x'", "'x'"),
        ("a\\b", "a\\b"),
        ('"{""k"":""a\\""b""}"', '{"k":"a\\"b"}'),  # JSON, whose quotes are doubled
        *((value, ValueError) for value in ('"', '"x', '"x"y', '"5" tv"', ' "x"')),
        *((value, ValueError) for value in ('"\\"x\\""', '"x\\""', '"x\\"', 'a\\"b')),
        *((f'"x{end}y"', ValueError) for end in ("\n", "\r", "\r\n")),
    ],
)
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_quote_stays_in_its_line(tmp_path, value, want, delimiter):
    line = f"1,2,{value}\n"
    # The same quote once more would end the value that the first one began.
    text = "a,b,c\n" + GOOD * 5 + line + GOOD + line + GOOD
    if want is not ValueError and "," in value:
        delimiter = ","
    path = put(tmp_path / "a.csv", text.replace(",", delimiter))
    for block_bytes in (64, 1000):
        options = {"delimiter": delimiter, "block_bytes": block_bytes}
        if want is ValueError:
            with pytest.raises(
                ValueError, match="a.csv row 6 has a quote out of place"
            ):
                read(path, max_bad_rows=99, **options)
        else:
            rows, numbers = read(path, **options)
            assert [row[2] for row in rows] == [*["3"] * 5, want, "3", want, "3"]
            assert numbers == list(range(1, 10))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    marks=st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from("\"\\,'")), max_size=9
    ),
    block_bytes=st.integers(60, 500),
)
def test_no_stray_character_costs_a_row(tmp_path_factory, marks, block_bytes):
    lines = as_csv([["x", 'y "z"', "5, 6"]] * 20)
    for at, mark in marks:
        lines = lines[:at] + mark + lines[at:]
    path = put(tmp_path_factory.mktemp("csv") / "a.csv", lines)
    try:
        _, numbers = read(path, block_bytes=block_bytes)
    except ValueError as error:
        assert re.search(r"a.csv (row \d+|header|has no column) ", str(error))
    else:
        assert numbers == list(range(1, 21))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_an_empty_line_is_a_row_of_one_column_only(tmp_path, end):
    path = put(tmp_path / "a.csv", "a\nx\n\ny\n".replace("\n", end))
    assert read(path, ("a",)) == ([("x",), (None,), ("y",)], [1, 2, 3])
    put(path, "a,b\n\nx,1\n\n\ny,2\n".replace("\n", end))
    assert read(path, ("a",)) == ([("x",), ("y",)], [1, 2])


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


def test_bad_rows_keep_their_numbers(tmp_path):
    text = "a,b,c\n" + '1,"x,y",3\n' * 9 + "1,2\n" + '1,"x,y",3\n' * 3
    rows, numbers = read(put(tmp_path / "a.csv", text), max_bad_rows=1)
    assert len(rows) == 12 and numbers == [*range(1, 10), 11, 12, 13]


@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_of_columns_are_compared_as_they_look(tmp_path, forms):
    header, name = (unicodedata.normalize(form, "gerät") for form in forms)
    path = put(tmp_path / "a.csv", f"a,{header}\n1,2\n")
    assert read(path, (name,)) == ([("2",)], [1])
    parquet.write_table(pa.table({"a": [1], header: [2]}), tmp_path / "a.parquet")
    blocks = read_parquet(str(tmp_path / "a.parquet"), (name, "a"), BadRows(0))
    assert next(blocks).table.to_pydict() == {name: [2], "a": [1]}
    with pytest.raises(ValueError, match=f"column '{name}' 2 times"):
        read(put(path, f"{header},{name}\n1,2\n"), (name,))
