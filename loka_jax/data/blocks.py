"""Blocks of raw rows: Arrow columns as read from a file, before any policy."""

import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from loka_jax.terminal import clip

pc: Any = pyarrow.compute  # its functions, made at import, have no types


class Block(NamedTuple):
    """A block of rows of one file.

    Attributes:
        table: the requested columns, of any Arrow type.
        rows: int64, the 1-based number of each row in its file; header and empty
            lines are not counted.
        file: the file's path, for messages.
    """

    table: pa.Table
    rows: np.ndarray
    file: str

    def column(self, name: str) -> pa.Array:
        """Returns a column in a plain type, see `plain`."""
        return plain(self.table.column(name).combine_chunks())

    def filter(self, chosen: np.ndarray) -> "Block":
        """Returns the rows that a mask chooses."""
        if chosen.all():
            return self
        table = self.table.filter(pa.array(chosen))
        return Block(table, self.rows[chosen], self.file)

    @property
    def nbytes(self) -> int:
        """The bytes of the columns as read or as numbers, whichever is more."""
        return max(self.table.nbytes, 8 * self.table.num_rows * self.table.num_columns)


class BadRows:
    """Counts rows with too few or too many columns, and has samples of the first."""

    NUM_SAMPLES = 5

    def __init__(self, limit: int):
        """Allows `limit` bad rows in all files together."""
        self.limit, self.count = limit, 0
        self.samples: list[dict] = []

    def add(self, file: str, row: int, columns: int, expected: int) -> bool:
        """Records a bad row; returns whether it may be skipped."""
        self.count += 1
        if len(self.samples) < self.NUM_SAMPLES:
            self.samples.append(
                {"file": file, "row": row, "columns": columns, "expected": expected}
            )
        return self.count <= self.limit


# Yields the requested columns of the file with this path, block by block. This is where
# a format of files plugs in: `loka_jax.data.files.reader_of` chooses its reader.
type Reader = Callable[..., Iterator[Block]]  # of path, columns and bad rows


def find_columns(file: str, requested: tuple[str, ...], header: list[str]) -> list[int]:
    """Returns the places of the requested columns.

    Names that look alike are alike: a letter with an accent may be one character or
    two (Unicode's NFC and NFD).
    """
    places, names = [], [unicodedata.normalize("NFC", name) for name in header]
    for name in requested:
        composed = unicodedata.normalize("NFC", name)
        if composed not in names:
            more = f" and {len(header) - 12} more" if len(header) > 12 else ""
            raise ValueError(
                f"{file} has no column {name!r}, only "
                f"{', '.join(map(clip, header[:12]))}{more}: name another column, or "
                "another file."
            )
        if (count := names.count(composed)) > 1:
            raise ValueError(
                f"{file} has column {name!r} {count} times: give its columns different "
                "names."
            )
        places.append(names.index(composed))
    return places


# How databases write null to text files, in columns of any kind.
NULL_WORDS = ("\\N", "NULL", "null")


def plain(column: pa.Array) -> pa.Array:
    """Returns the column without dictionary, extension type, views or runs."""
    kind = column.type
    if isinstance(column, pa.ExtensionArray):
        return plain(column.storage)
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(column))
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary).take(column.indices)
    if element_type(kind) != kind:
        offsets = np.append(0, np.cumsum(list_lengths(column)))
        values = plain(pc.list_flatten(column))
        return pa.LargeListArray.from_arrays(offsets, values)  # null becomes empty
    if pa.types.is_string_view(kind):
        return column.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return column.cast(pa.large_binary())
    return column


def element_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of a list's elements, or the type itself if it is no list."""
    is_list = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    is_list += (pa.types.is_list_view, pa.types.is_large_list_view)
    return kind.value_type if any(check(kind) for check in is_list) else kind


def list_lengths(column: pa.Array) -> np.ndarray:
    """Returns the number of elements of each list in int64, 0 for a missing one."""
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
    return np.where(column.is_null(), 0, lengths)


def as_dates(array: pa.Array) -> pa.Array | None:
    """Returns a column of dates, or of text as in ISO 8601, as timestamps, or None."""
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        return array
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        for zone in (None, "UTC"):
            try:
                return array.cast(pa.timestamp("us", zone))
            except pa.ArrowInvalid:
                continue
    return None
