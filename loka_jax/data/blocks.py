"""Blocks of raw rows: Arrow columns as read from a file, before any policy."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loka_jax.terminal import shown


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

    @property
    def nbytes(self) -> int:
        """The bytes of the columns as read or as numbers, whichever is more."""
        return max(self.table.nbytes, 8 * self.table.num_rows * self.table.num_columns)


class BadRows:
    """Counts rows with too few or too many columns and records the first few.

    Attributes:
        limit: number of bad rows allowed in all files together.
        count: number of bad rows so far.
        samples: file, row and column counts of the first few.
    """

    NUM_SAMPLES = 5

    def __init__(self, limit: int):
        """Allows `limit` bad rows in all files together."""
        self.limit = limit
        self.count = 0
        self.samples: list[dict] = []

    def add(self, file: str, row: int, columns: int, expected: int) -> bool:
        """Records a bad row; returns whether it may be skipped."""
        self.count += 1
        if len(self.samples) < self.NUM_SAMPLES:
            self.samples.append(
                {"file": file, "row": row, "columns": columns, "expected": expected}
            )
        return self.count <= self.limit


@runtime_checkable
class Reader(Protocol):
    """Reads the requested columns of one file, block by block."""

    def __call__(
        self, path: str, columns: tuple[str, ...], bad_rows: BadRows
    ) -> Iterator[Block]:
        """Yields the file's blocks in order."""
        ...


def check_columns(file: str, requested: tuple[str, ...], header: list[str]) -> None:
    """Raises ValueError if the file lacks a requested column or has it twice."""
    counts = Counter(header)
    for name in requested:
        if name not in counts:
            raise ValueError(
                f"{file} has no column {name!r}, only {_shortened(header)}: name "
                "another column, or another file."
            )
        if (count := counts[name]) > 1:
            raise ValueError(
                f"{file} has column {name!r} {count} times: give its columns different "
                "names."
            )


def element_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of a list's elements, or the type itself if it is no list."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return kind.value_type if is_list or pa.types.is_fixed_size_list(kind) else kind


def list_lengths(column: pa.Array) -> np.ndarray:
    """Returns the number of elements of each list in int64, 0 for a missing one."""
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0), np.int64)
    return np.where(column.is_null(), 0, lengths)


def _shortened(names: list[str], limit: int = 12) -> str:
    start = ", ".join(shown(name) for name in names[:limit])
    return f"{start} and {len(names) - limit} more" if len(names) > limit else start
