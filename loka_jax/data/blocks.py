"""Raw rows as they come out of a file, before any policy: blocks of Arrow columns."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa


class Block(NamedTuple):
    """Some rows of one file.

    Attributes:
        table: the wanted columns, in any Arrow type.
        rows: int64, the 1-based number of each row in its file; a header line, and
            empty lines, are not counted.
        file: the file's path, for messages.
    """

    table: pa.Table
    rows: np.ndarray
    file: str


class BadRows:
    """Counts the rows that have too few or too many columns, and keeps some.

    Attributes:
        count: the rows left out so far.
        samples: what is known of the first few.
    """

    NUM_SAMPLES = 5

    def __init__(self, most: int):
        """Allows `most` bad rows in all files together."""
        self.most = most
        self.count = 0
        self.samples: list[dict] = []

    def add(self, file: str, row: int, found: int, expected: int) -> bool:
        """Notes a row; returns whether it may be left out."""
        self.count += 1
        if len(self.samples) < self.NUM_SAMPLES:
            self.samples.append(
                {"file": file, "row": row, "columns": found, "expected": expected}
            )
        return self.count <= self.most


@runtime_checkable
class Reader(Protocol):
    """Reads the wanted columns of one file, block by block."""

    def __call__(
        self, path: str, columns: tuple[str, ...], bad_rows: BadRows
    ) -> Iterator[Block]:
        """Yields the file's blocks in order."""
        ...


def check_columns(
    file: str, wanted: tuple[str, ...], found: tuple[str, ...] | list[str]
) -> None:
    """Raises ValueError if the file lacks a column, or has a wanted one twice."""
    for name in wanted:
        if name not in found:
            raise ValueError(
                f"{file} has no column {name!r}, only {_shortened(found)}: correct "
                "--data.label, --data.dense or --data.categorical."
            )
        if list(found).count(name) > 1:
            raise ValueError(
                f"{file} has column {name!r} {list(found).count(name)} times: give "
                "its columns different names."
            )


def _shortened(names: tuple[str, ...] | list[str], most: int = 12) -> str:
    shown = ", ".join(str(name)[:40] for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
