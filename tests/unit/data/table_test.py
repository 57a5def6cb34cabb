"""CSV, TSV and Parquet: what is read, and one sentence for what cannot be."""

import gzip
import os

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.support.data import HEADER, open_table, rows_of, rows_text, write


def arrow_table(count=100):
    index = np.arange(1, count + 1)
    return pa.table(
        {
            "click": index % 2,
            "price": index,
            "age": index % 50,
            "user": [f"u{i % 7}" for i in index],
            "item": [f"i{i % 11}" for i in index],
        }
    )


def test_every_format_gives_the_same_examples(tmp_path):
    text = HEADER + rows_text(100)
    write(tmp_path / "a.csv", text)
    write(tmp_path / "a.tsv", text.replace(",", "\t"))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(text.replace(",", "\t").encode()))
    write(tmp_path / "c.csv", text.replace("\n", "\r\n"))
    write(tmp_path / "d.csv", "\ufeff" + text)
    parquet.write_table(arrow_table(), tmp_path / "a.parquet")
    want = rows_of(open_table(tmp_path / "a.csv"))
    for name in ("a.tsv", "b.csv.gz", "b.tsv.gz", "c.csv", "d.csv", "a.parquet"):
        got = rows_of(open_table(tmp_path / name))
        for a, b in zip(want, got, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_column_order_and_extra_columns_do_not_matter(tmp_path):
    a = write(tmp_path / "a.csv", HEADER + rows_text(50))
    table = arrow_table(50).append_column("extra", pa.array([[1]] * 50))
    names = ["extra", "item", "user", "age", "click", "price"]
    parquet.write_table(table.select(names), tmp_path / "b.parquet")
    want, got = rows_of(open_table(a)), rows_of(open_table(tmp_path / "b.parquet"))
    assert np.array_equal(want.ids, got.ids) and np.array_equal(want.dense, got.dense)


def test_quoted_values_keep_their_delimiters(tmp_path):
    text = HEADER + '1,2,3,"a,b",i\n' * 30
    splits = open_table(write(tmp_path / "a.csv", text))
    assert splits.train.schema.vocab_sizes == (2, 2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "a.csv is empty"),
        ("a.csv", b"\n\n", "a.csv is empty"),
        ("a.tsv.gz", gzip.compress(b"", mtime=0), "a.tsv.gz is empty"),
        ("a.csv", HEADER.encode(), "no rows"),
        ("a.csv", HEADER.strip().encode(), "no rows"),
        ("a.parquet", b"", r"a.parquet is empty \(0 bytes\)"),
        (
            "a.parquet",
            b"PAR1 no more of it",
            "a.parquet cannot be read: it is not a compl",
        ),
        (
            "a.csv.gz",
            b"click,price\n1,2\n",
            "a.csv.gz cannot be read: it is not a gzip",
        ),
        ("a.csv", b"click,price\n\x00\x01\x02\xff\n", "not UTF-8 text"),
        ("a.csv", bytes(range(256)) * 20, "not UTF-8 text"),
        ("a.dat", b"click\n1\n", "must end in .csv, .tsv .* or .parquet"),
    ],
)
def test_what_is_no_table_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_table(tmp_path / name)


def test_random_bytes_never_get_further_than_one_sentence(tmp_path):
    rng = np.random.default_rng(0)
    for size in (1, 10, 1000, 100_000):
        path = tmp_path / "junk.csv"
        path.write_bytes(HEADER.encode() + rng.bytes(size))
        with pytest.raises(ValueError, match="junk.csv"):
            open_table(path, max_bad_rows=3)


def test_cut_off_gzip_is_named_and_none_of_it_used(tmp_path):
    whole = gzip.compress((HEADER + rows_text(50_000)).encode())
    (tmp_path / "a.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="a.csv.gz cannot be read: it is cut off"):
        open_table(tmp_path / "a.csv.gz")
    assert not list((tmp_path / "cache").iterdir())


def test_cut_off_parquet_is_named(tmp_path):
    parquet.write_table(arrow_table(), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="a.parquet cannot be read: it is not a compl"):
        open_table(tmp_path / "a.parquet")


def test_flipped_byte_in_a_checksummed_page_is_found(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"use_dictionary": False, "compression": "none"}
    parquet.write_table(arrow_table(5000), path, write_page_checksum=True, **columns)
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a page does not match its checksum"):
        open_table(path)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
@pytest.mark.parametrize(
    "wrong", [{"label": "clock"}, {"dense": ("prize",)}, {"categorical": ("usr",)}]
)
def test_missing_column_is_told_with_those_found(tmp_path, name, wrong):
    write(tmp_path / "a.csv", HEADER + rows_text(9))
    parquet.write_table(arrow_table(9), tmp_path / "a.parquet")
    (column,) = np.ravel(list(wrong.values()))
    message = f"{name} has no column '{column}', only click, price, age, user, item"
    with pytest.raises(ValueError, match=message):
        open_table(tmp_path / name, **wrong)


def test_repeated_column_is_refused(tmp_path):
    path = write(tmp_path / "a.csv", "click,price,age,user,user,item\n1,2,3,4,5,6\n")
    with pytest.raises(ValueError, match="column 'user' 2 times"):
        open_table(path)


def test_short_and_long_rows_are_refused_by_number(tmp_path):
    path = write(tmp_path / "a.csv", HEADER + rows_text(9) + "1,2,3\n" + rows_text(9))
    with pytest.raises(ValueError, match="row 10 has 3 columns, expected 5.*max-bad-r"):
        open_table(path)


def test_allowed_bad_rows_are_left_out_counted_and_kept_as_samples(tmp_path):
    text = HEADER + rows_text(9) + "1,2,3\n\n" + rows_text(9) + "1,2,3,4,5,6\n"
    splits = open_table(write(tmp_path / "a.csv", text), max_bad_rows=2)
    assert sum(splits.report["examples"].values()) == 18
    bad = splits.report["bad_rows"]
    assert bad["count"] == 2
    assert bad["samples"] == [
        {"file": "a.csv", "row": 10, "columns": 3, "expected": 5},
        {"file": "a.csv", "row": 20, "columns": 6, "expected": 5},
    ]


def test_one_bad_row_more_than_allowed_fails(tmp_path):
    text = HEADER + rows_text(9) + "1,2,3\n" * 3
    with pytest.raises(ValueError, match="row 12 has 3 col.*3 bad rows are more than"):
        open_table(write(tmp_path / "a.csv", text), max_bad_rows=2)


def test_rows_after_bad_ones_keep_their_numbers(tmp_path):
    text = HEADER + rows_text(3) + "1\n" * 2 + rows_text(3) + "7,1,1,a,b\n"
    with pytest.raises(ValueError, match="row 9 has 7 in label column"):
        open_table(write(tmp_path / "a.csv", text), max_bad_rows=5)


def test_row_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "a.csv"
    text = (HEADER + rows_text(20_000)).encode()
    path.write_bytes(text + b"1,2,3,\xff\xfe,i\n")
    with pytest.raises(ValueError, match="a.csv row .* is not UTF-8 text"):
        open_table(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user other than root")
def test_unreadable_file_is_named(tmp_path):
    path = tmp_path / "a.csv"
    write(path, HEADER + rows_text(9))
    path.chmod(0)
    with pytest.raises(ValueError, match="permission denied"):
        open_table(path)
