"""CSV and TSV files, `.gz` too, as blocks of string columns.

Every value is read as a string: `values.py` parses numbers and handles missing ones for
all formats, and a column's type never depends on the values that it happens to hold.
"""

import contextlib
import csv
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyarrow import csv as pa_csv

from loka_jax.data.blocks import BadRows, Block, check_columns

BLOCK_BYTES = 1 << 24
_HEAD_BYTES = 1 << 16
_BAD_ROW = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_BAD_TEXT = re.compile(r"Row #(\d+): .*invalid UTF8")


def read_text(
    path: str,
    columns: tuple[str, ...],
    bad_rows: BadRows,
    *,
    delimiter: str,
    names: tuple[str, ...] | None = None,
) -> Iterator[Block]:
    """Yields the file's rows as string columns, empty values as null.

    Args:
        path: the file.
        columns: the columns to keep.
        bad_rows: counts the rows with a wrong number of columns, which are skipped.
        delimiter: one character.
        names: the names of all columns, if the file has no header line.

    Raises:
        ValueError: with file and row, if the file is empty, damaged, not text, lacks
            a column, or has more bad rows than allowed.
    """
    head = _head(path)
    if names is None:
        header = next(csv.reader(io.StringIO(head), delimiter=delimiter), [])
        check_columns(path, columns, header)
    elif (width := len(head.splitlines()[0].split(delimiter))) != len(names):
        raise ValueError(
            f"{path} has {width} columns in row 1, expected {len(names)} "
            f"separated by {_delimiter_name(delimiter)}: check --data.kind and the "
            "file."
        )
    yield from _blocks(path, columns, bad_rows, delimiter, names)


def _head(path: str) -> str:
    """Returns the file's first lines, checked to be text."""
    opener = gzip.open if path.endswith(".gz") else open
    try:
        with opener(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {damage(error)}") from None
    head = head.lstrip(b"\r\n")
    if not head.strip():
        raise ValueError(f"{path} is empty: it needs a row for every example.")
    try:
        # Whole lines only, as the last character read may be cut in two.
        text = head[: head.rfind(b"\n") + 1 or None].decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(
            f"{path} is not UTF-8 text: convert it first, or correct --data.path."
        )
    return text


def _blocks(path, columns, bad_rows, delimiter, names) -> Iterator[Block]:
    header_lines = 0 if names else 1
    skipped: list[int] = []  # numbers of the bad rows in this file, ascending

    def on_bad_row(row: pa_csv.InvalidRow) -> str:
        number = row.number - header_lines
        skipped.append(number)
        allowed = bad_rows.add(path, number, row.actual_columns, row.expected_columns)
        return "skip" if allowed else "error"

    done = 0
    with _undecodable_rows_are_errors():
        try:
            reader = _open(path, columns, delimiter, names, on_bad_row)
            for batch in reader:
                rows = _row_numbers(done, batch.num_rows, skipped)
                done += batch.num_rows
                yield Block(pa.Table.from_batches([batch]), rows, path)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(_explain(path, error, header_lines, bad_rows)) from None


def _open(path, columns, delimiter, names, on_bad_row) -> pa_csv.CSVStreamingReader:
    return pa_csv.open_csv(
        path,
        # Arrow numbers rows only when it reads with one thread.
        read_options=pa_csv.ReadOptions(
            use_threads=False, block_size=BLOCK_BYTES, column_names=names
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=delimiter,
            # Criteo's format has no quotes: a stray one would swallow lines.
            quote_char=False if names else '"',
            invalid_row_handler=on_bad_row,
        ),
        convert_options=pa_csv.ConvertOptions(
            include_columns=columns,
            column_types={name: pa.string() for name in columns},
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


@contextlib.contextmanager
def _undecodable_rows_are_errors() -> Iterator[None]:
    """Keeps Arrow from printing a traceback when a bad row is not UTF-8.

    Arrow decodes the row before it calls the handler, reports a failure there as
    "unraisable", and then treats the row as an error, which is right.
    """
    default_hook = sys.unraisablehook

    def hook(unraisable, /):
        if not isinstance(unraisable.exc_value, UnicodeDecodeError):
            default_hook(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = default_hook


def _row_numbers(done: int, count: int, skipped: list[int]) -> np.ndarray:
    """Returns the row numbers in the file of its good rows `done` to `done + count`."""
    # The j-th skipped row (from 0) lies before good row i if skipped[j] - j <= i.
    nth_good = np.arange(done + 1, done + count + 1, dtype=np.int64)
    shifted = np.asarray(skipped, np.int64) - np.arange(len(skipped), dtype=np.int64)
    return nth_good + np.searchsorted(shifted, nth_good, side="right")


def _explain(path: str, error: Exception, header_lines: int, bad_rows: BadRows) -> str:
    text = str(error)
    if match := _BAD_ROW.search(text):
        number, expected, actual = (int(group) for group in match.groups())
        return (
            f"{path} row {number - header_lines} has {actual} columns, expected "
            f"{expected}: {bad_rows.count} bad rows are more than --data.max-bad-rows "
            f"{bad_rows.limit}; correct the file or raise the limit."
        )
    if match := _BAD_TEXT.search(text):
        row = int(match.group(1)) - header_lines
        return f"{path} row {row} is not UTF-8 text: convert the file first."
    return f"{path} cannot be read: {damage(error)}"


def damage(error: Exception) -> str:
    """Returns the meaning of a failed read and, if there is one, the remedy."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "Empty CSV" in text:
        return "it has a header and no rows."
    if isinstance(error, EOFError) or "truncated" in text.lower():
        return "it is cut off; get the file again."
    if isinstance(error, PermissionError):
        return "permission denied."
    if "header check" in text or "not a gzipped file" in text.lower():
        return "it is not a gzip file; get it again or drop .gz from its name."
    return f"it is damaged ({text[:120]}); get the file again."


def _delimiter_name(delimiter: str) -> str:
    return {"\t": "tabs", ",": "commas"}.get(delimiter, repr(delimiter))
