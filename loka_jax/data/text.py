"""CSV and TSV files, `.gz` too, as blocks of string columns.

A row is a line: quotes may hold separators, and no line breaks. So no quote can reach
into another row, and a line whose quotes do not fit is refused by its number. Every
value is read as a string: `values.py` parses numbers and handles missing ones for all
formats, and a column's type never depends on the values that it happens to hold.
"""

import codecs
import contextlib
import csv
import functools
import gzip
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv as pa_csv

from loka_jax.data.blocks import BadRows, Block, find_columns
from loka_jax.data.places import open_file
from loka_jax.terminal import clip

BLOCK_BYTES = 1 << 24  # read at once; also the longest row
_ROW = re.compile(r"Row #(\d+)")
_LINE_END = re.compile(rb"\r\n?|\n")


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
        bad_rows: counts the rows with a wrong number of columns, which are skipped.
        delimiter: one character.
        names: the names of all columns, if the file has no header line; a file may lack
            the first one, the label. Quotes then have no meaning.
        block_bytes: how much is read at once; also the longest row.

    Raises:
        ValueError: with file and row, if the file is empty, damaged, not text, lacks
            a column, has a row longer than a block or with a quote out of place, or
            has more bad rows than allowed.
    """
    file = _TextFile(path, bad_rows, delimiter, names or (), block_bytes)
    try:
        yield from file.blocks(columns)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {damage(error)}") from None


def read_header(path: str, *, delimiter: str) -> list[str]:
    """Returns the names of a file's columns, by its first line.

    Raises:
        ValueError: with the file, if it is empty, damaged, or not text.
    """
    file = _TextFile(path, BadRows(0), delimiter, (), BLOCK_BYTES)
    try:
        file._without_header(next(file._lines()))
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {damage(error)}") from None
    return file.header


@dataclass
class _TextFile:
    """A text file, read once; the first fields are the arguments of `read_text`."""

    path: str
    bad_rows: BadRows
    delimiter: str
    names: tuple[str, ...]
    block_bytes: int
    header: list[str] = field(default_factory=list)
    done: int = 0  # rows, bad ones too

    def blocks(self, columns: tuple[str, ...]) -> Iterator[Block]:
        places: list[int] = []
        for lines in self._lines():
            if not self.header:
                lines = self._without_header(lines)
                places = find_columns(self.path, columns, self.header)
            if not lines:  # the header alone
                continue
            self._check_quotes(lines)
            table, rows = self._parse(lines, places)
            if len(rows):
                yield Block(table.rename_columns(columns), rows, self.path)
        if not self.done:
            raise ValueError(
                f"{self.path} cannot be read: it has a header and no rows."
            )

    def _lines(self) -> Iterator[bytes]:
        """Yields the file's bytes, cut at line ends; the last line has one, too."""
        waiting, done = b"", 0
        with open_file(self.path) as raw, _unpacked(raw, self.path) as file:
            while data := file.read(self.block_bytes - len(waiting)):
                if (at := data.find(b"\0")) >= 0:
                    raise ValueError(
                        f"{self.path} is not UTF-8 text (its byte {done + at + 1:,} "
                        "is NUL): convert it first, or correct --data.path."
                    )
                done += len(data)
                waiting += data
                # The line feed of a last carriage return may come with the next part.
                end = max(waiting.rfind(b"\n"), waiting.rfind(b"\r", 0, -1)) + 1
                if end:
                    yield waiting[:end]
                elif len(waiting) >= self.block_bytes:
                    raise ValueError(
                        f"{self.path} row {self.done + 1} is longer than "
                        f"{self.block_bytes:,} bytes: shorten it."
                    )
                waiting = waiting[end:]
        if waiting or not done:
            yield waiting + b"\n"

    def _without_header(self, lines: bytes) -> bytes:
        """Finds the names of the columns, and returns the lines of rows."""
        names = self.names
        lines = lines.removeprefix(codecs.BOM_UTF8).lstrip(b"\r\n")
        if not lines.strip():
            raise ValueError(f"{self.path} is empty: it needs a row for every example.")
        first, rest = _LINE_END.split(lines, 1)
        self._check_quotes(first + b"\n")
        cells = self._cells(first)
        if not names:
            self.header = cells
            return rest
        self.header = list(names[1:] if len(cells) == len(names) - 1 else names)
        if len(cells) != len(self.header):
            separator = "tabs" if self.delimiter == "\t" else repr(self.delimiter)
            raise ValueError(
                f"{self.path} has {len(cells)} columns in row 1, expected "
                f"{len(names)} separated by {separator}: check --data.kind and the "
                "file."
            )
        return lines

    def _cells(self, line: bytes) -> list[str]:
        quoting = csv.QUOTE_NONE if self.names else csv.QUOTE_MINIMAL
        try:
            text = [line.decode()]
            return next(csv.reader(text, delimiter=self.delimiter, quoting=quoting))
        except UnicodeDecodeError:
            raise ValueError(
                f"{self.path} is not UTF-8 text: convert it first, or correct "
                "--data.path."
            ) from None
        except csv.Error as error:
            raise ValueError(
                f"{self.path} has a first row that cannot be read ({error}): correct "
                "the file, or --data.path."
            ) from None

    def _check_quotes(self, lines: bytes) -> None:
        """Raises ValueError for a line whose quotes have two meanings, or none."""
        if self.names or b'"' not in lines:
            return
        match = _well_quoted(self.delimiter).match(lines)
        end = match.end() if match else 0
        if end == len(lines):
            return
        before = map(len, lines[:end].splitlines())
        row = self.done + 1 + sum(size > 0 or self._is_narrow for size in before)
        line = _LINE_END.split(lines[end:], 1)[0].decode(errors="replace")
        raise ValueError(
            f"{self.path} {f'row {row}' if self.header else 'header'} has a quote "
            f"out of place ({clip(line)}): quote values at both ends and within one "
            "line, and write quotes in them twice, or store the rows as Parquet."
        )

    @property
    def _is_narrow(self) -> bool:
        """Whether an empty line is a row: one of one column, with a missing value."""
        return len(self.header) == 1

    def _parse(self, lines: bytes, places: list[int]) -> tuple[pa.Table, np.ndarray]:
        """Returns the good rows, and their numbers in the file."""
        skipped: list[int] = []  # numbers of the bad rows in these lines, ascending
        why = []  # the last of them is not skipped

        def on_bad_row(row: pa_csv.InvalidRow) -> str:
            skipped.append(row.number)
            place = self.path, self.done + row.number
            if self.bad_rows.add(*place, row.actual_columns, row.expected_columns):
                return "skip"
            count = self.bad_rows.count
            bad = f"{count} bad rows are" if count > 1 else "1 bad row is"
            why.append(
                f"{place[0]} row {place[1]} has {row.actual_columns} columns, expected "
                f"{row.expected_columns}: {bad} more than "
                f"--data.max-bad-rows {self.bad_rows.limit}; correct the file or "
                "raise the limit."
            )
            return "error"

        with _undecodable_rows_are_errors():
            try:
                table = self._read(lines, [str(place) for place in places], on_bad_row)
            except pa.ArrowException as error:
                if match := _ROW.search(str(error)):
                    row = self.done + int(match.group(1))
                    text = "is not UTF-8 text: convert the file first."
                    why.append(f"{self.path} row {row} {text}")
                why.append(f"{self.path} cannot be read: {damage(error)}")
                raise ValueError(why[0]) from None
        count = table.num_rows + len(skipped)
        numbers = np.arange(self.done + 1, self.done + count + 1, dtype=np.int64)
        self.done += count
        return table, np.delete(numbers, np.array(skipped, np.int64) - 1)

    def _read(self, lines: bytes, columns: list[str], on_bad_row) -> pa.Table:
        return pa_csv.read_csv(
            pa.BufferReader(lines),
            # Arrow numbers rows only when it reads with one thread.
            read_options=pa_csv.ReadOptions(
                use_threads=False,
                block_size=len(lines),
                column_names=[str(place) for place in range(len(self.header))],
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=False if self.names else '"',
                ignore_empty_lines=not self._is_narrow,
                invalid_row_handler=on_bad_row,
            ),
            convert_options=pa_csv.ConvertOptions(
                include_columns=columns,
                column_types={name: pa.string() for name in columns},
                null_values=[""],
                strings_can_be_null=True,
            ),
        )


@functools.cache
def _well_quoted(delimiter: str) -> re.Pattern[bytes]:
    r"""Returns the pattern of lines in which quotes have one meaning.

    A value that begins with a quote ends with one, and those in it are doubled. In
    other values quotes are text. Where a backslash before a quote could be an escape,
    as in `"say \"hi\""`, the line does not match.
    """
    d = re.escape(delimiter.encode())
    quoted = rb'"(?:[^"\\\r\n]++|""|\\(?!"{1,2}(?:%b|[\r\n])))*+"' % d
    plain = rb'(?! *")(?:[^%b\\\r\n]++|\\(?!"))*+' % d
    value = rb"(?:%b|%b)" % (quoted, plain)
    line = rb'(?:[^"\r\n]*+|%b(?:%b%b)*+)' % (value, d, value)
    return re.compile(rb"(?:%b(?:\r\n?|\n))*+" % line)


def _unpacked(file: Any, path: str) -> Any:
    return gzip.open(file, "rb") if path.endswith(".gz") else file


@contextlib.contextmanager
def _undecodable_rows_are_errors() -> Iterator[None]:
    """Keeps Arrow from printing a traceback when a bad row is not UTF-8.

    Arrow decodes the row before it calls the handler, reports a failure there as
    "unraisable", and then treats the row as an error: of its text, as `_parse` says.
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


def damage(error: Exception) -> str:
    """Returns the meaning of a failed read and, if there is one, the remedy."""
    text = clip(str(error) or type(error).__name__, 200)
    if isinstance(error, EOFError) or "truncated" in text.lower():
        return "it is cut off; get the file again."
    if isinstance(error, PermissionError):
        return "permission denied."
    if "header check" in text or "not a gzipped file" in text.lower():
        return "it is not a gzip file; get it again or drop .gz from its name."
    if "magic bytes" in text:
        return "it is not a complete Parquet file (no footer); get it again."
    if "CRC checksum" in text:  # of a page
        return "a page does not match its checksum; get the file again."
    return f"it is damaged ({text[:120].strip()}); get the file again."
