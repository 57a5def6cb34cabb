"""CSV and TSV files, `.gz` too, as blocks of string columns.

Every value is read as a string: `values.py` parses numbers and handles missing ones for
all formats, and a column's type never depends on the values that it happens to hold.
"""

import contextlib
import csv
import gzip
import io
import re
import secrets
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyarrow import csv as pa_csv

from loka_jax.data.blocks import BadRows, Block, check_columns
from loka_jax.terminal import shown

BLOCK_BYTES = 1 << 24  # read at once; also the longest row
_BAD_ROW = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_BAD_TEXT = re.compile(r"Row #(\d+): .*invalid UTF8")


def read_text(
    path: str,
    columns: tuple[str, ...],
    bad_rows: BadRows,
    *,
    delimiter: str,
    names: tuple[str, ...] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Iterator[Block]:
    """Yields the file's rows as string columns, empty values as null.

    Args:
        path: the file.
        columns: the columns to keep.
        bad_rows: counts the rows with a wrong number of columns, which are skipped.
        delimiter: one character.
        names: the names of all columns, if the file has no header line; quotes then
            have no meaning.
        block_bytes: how much is read at once; also the longest row.

    Raises:
        ValueError: with file and row, if the file is empty, damaged, not text, lacks
            a column, has a row longer than a block or a quote that is never closed,
            or has more bad rows than allowed.
    """
    try:
        with _Stream(path, block_bytes) as stream:
            header = _first_row(stream, delimiter, names)
            check_columns(path, columns, header)
            yield from _blocks(stream, columns, bad_rows, delimiter, header, names)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {damage(error)}") from None


class _Stream(io.RawIOBase):
    """The bytes of a text file, unpacked and checked for NUL, then an end mark.

    Attributes:
        path: the file.
        block_bytes: how much is read at once.
        head: the first block, which `read` returns, too.
        end_mark: what `read` returns after the file's bytes.
    """

    def __init__(self, path: str, block_bytes: int):
        """Opens the file and reads its first block."""
        self.path, self.block_bytes, self.end_mark = path, block_bytes, b""
        self._file = gzip.open(path) if path.endswith(".gz") else open(path, "rb")
        self._done = 0
        try:
            self.head = self._waiting = self._next(block_bytes)
        except BaseException:  # even Ctrl-C must not leave the file open
            self.close()
            raise

    def readable(self) -> bool:
        """Returns True."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Returns the next `size` bytes or fewer; none at the end.

        Line ends of two characters are not split: Arrow would drop the second one, even
        from a quoted value (apache/arrow#51368).
        """
        if size < 0:
            size = self.block_bytes
        data = self._waiting + self._next(max(size - len(self._waiting), 0))
        if len(data) < size:
            data, self.end_mark = data + self.end_mark, b""
        end = size - 1 if data[size - 1 : size] == b"\r" else size
        self._waiting = data[end:]
        return data[:end]

    def _next(self, size: int) -> bytes:
        data = self._file.read(size)
        if (at := data.find(b"\0")) >= 0:
            raise ValueError(
                f"{self.path} is not UTF-8 text (its byte {self._done + at + 1:,} is "
                "NUL): convert it first, or correct --data.path."
            )
        self._done += len(data)
        return data

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()


def _first_row(
    stream: _Stream, delimiter: str, names: tuple[str, ...] | None
) -> list[str]:
    """Returns the names of the columns, after checking the first row."""
    path, head = stream.path, stream.head
    if not head.strip():
        raise ValueError(f"{path} is empty: it needs a row for every example.")
    lines = io.TextIOWrapper(io.BytesIO(head), encoding="utf-8-sig", newline="")
    quoting = csv.QUOTE_NONE if names else csv.QUOTE_MINIMAL
    rows = csv.reader(lines, delimiter=delimiter, quoting=quoting)
    try:
        row = next((row for row in rows if row), [])
        is_whole = len(head) < stream.block_bytes or lines.read(1)
    except UnicodeDecodeError:
        raise ValueError(
            f"{path} is not UTF-8 text: convert it first, or correct --data.path."
        ) from None
    except csv.Error as error:
        raise ValueError(
            f"{path} has a first row that cannot be read ({error}): correct the file, "
            "or --data.path."
        ) from None
    if not is_whole:
        raise ValueError(_too_long(stream, done=0))
    if names and len(row) != len(names):
        raise ValueError(
            f"{path} has {len(row)} columns in row 1, expected {len(names)} "
            f"separated by {_delimiter_name(delimiter)}: check --data.kind and the "
            "file."
        )
    return list(names or row)


def _blocks(stream, columns, bad_rows, delimiter, header, names) -> Iterator[Block]:
    """Yields the blocks of a stream.

    Arrow takes a quote that is never closed for one long value, so rows vanish in it.
    Therefore the file is followed by a row with too many columns: if Arrow does not
    report it, it lies inside of such a value.
    """
    header_lines = 0 if names else 1
    skipped: list[int] = []  # numbers of the bad rows in this file, ascending
    end_mark = f"end {secrets.token_hex(16)}" + delimiter * len(header)
    stream.end_mark = f"\n{end_mark}\n".encode()
    ended = False

    def on_bad_row(row: pa_csv.InvalidRow) -> str:
        nonlocal ended
        if row.text == end_mark:
            ended = True
            return "skip"
        number = row.number - header_lines
        skipped.append(number)
        allowed = bad_rows.add(
            stream.path, number, row.actual_columns, row.expected_columns
        )
        return "skip" if allowed else "error"

    done = 0
    with _undecodable_rows_are_errors():
        try:
            for batch in _open(stream, columns, delimiter, names, on_bad_row):
                rows = _row_numbers(done, batch.num_rows, skipped)
                done += batch.num_rows
                yield Block(pa.Table.from_batches([batch]), rows, stream.path)
        except pa.ArrowException as error:
            done += len(skipped)
            raise ValueError(
                _explain(stream, error, header_lines, bad_rows, done)
            ) from None
    if not ended:
        raise ValueError(
            f"{stream.path} ends inside of a quoted value: close the quote, or get the "
            "file again."
        )


def _open(stream, columns, delimiter, names, on_bad_row) -> pa_csv.CSVStreamingReader:
    return pa_csv.open_csv(
        stream,
        # Arrow numbers rows only when it reads with one thread.
        read_options=pa_csv.ReadOptions(
            use_threads=False, block_size=stream.block_bytes, column_names=names
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=delimiter,
            # Criteo's format has no quotes: a stray one would swallow lines.
            quote_char=False if names else '"',
            newlines_in_values=not names,
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


def _explain(
    stream: _Stream, error: Exception, header_lines: int, bad_rows: BadRows, done: int
) -> str:
    path, text = stream.path, str(error)
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
    if "straddl" in text:
        return _too_long(stream, done)
    return f"{path} cannot be read: {damage(error)}"


def _too_long(stream: _Stream, done: int) -> str:
    return (
        f"{stream.path} row {done + 1} or one after it is longer than "
        f"{stream.block_bytes:,} bytes: close its quotes, or shorten it."
    )


def damage(error: Exception) -> str:
    """Returns the meaning of a failed read and, if there is one, the remedy."""
    text = shown(str(error) or type(error).__name__, 200)
    if "Empty CSV" in text:
        return "it has a header and no rows."
    if isinstance(error, EOFError) or "truncated" in text.lower():
        return "it is cut off; get the file again."
    if isinstance(error, PermissionError):
        return "permission denied."
    if "header check" in text or "not a gzipped file" in text.lower():
        return "it is not a gzip file; get it again or drop .gz from its name."
    return f"it is damaged ({text[:120].strip()}); get the file again."


def _delimiter_name(delimiter: str) -> str:
    return {"\t": "tabs", ",": "commas"}.get(delimiter, repr(delimiter))
