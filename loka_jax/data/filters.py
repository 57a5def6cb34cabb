"""Rows by a comparison, as in `dt<2026-11-13`: of a partition, or of a column.

Values are compared as dates where the column holds dates, as numbers where both are
numbers, and else as text. Dates of the form 2026-11-01 are in order as text, too.
"""

import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from loka_jax.data.blocks import Block, as_dates, pc

_OPERATIONS = {
    "<=": pc.less_equal,
    ">=": pc.greater_equal,
    "!=": pc.not_equal,
    "==": pc.equal,
    "=": pc.equal,
    "<": pc.less,
    ">": pc.greater,
}
_COMPARISON = re.compile(
    r"\s*([^<>=!\s][^<>=!]*?)\s*(<=|>=|!=|==|=|<|>)\s*([^<>=!]+?)\s*"
)


class Comparison(NamedTuple):
    """Rows whose value of a column compares so with another one."""

    column: str
    operation: str
    value: str

    def holds(self, array: pa.Array) -> np.ndarray:
        """Returns which values it holds for; for a missing one it does not."""
        compare = _OPERATIONS[self.operation]
        dates = as_dates(array)
        if dates is not None:
            micros = dates.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
            found = compare(micros, self._date().cast(pa.int64()))
        elif (numbers := _numbers(array)) is not None and self._number() is not None:
            found = compare(numbers, pa.scalar(self._number()))
        else:
            found = compare(array.cast(pa.large_string()), self.value)
        return np.asarray(pc.fill_null(found, False))

    def _date(self) -> pa.Scalar:
        for zone in (None, "UTC"):
            try:
                return pa.scalar(self.value).cast(pa.timestamp("us", zone))
            except pa.ArrowInvalid:
                continue
        raise ValueError(
            f"{self.column!r} holds dates, and {self.value!r} is none: write one such "
            "as 2026-11-13 or 2026-11-13T06:00."
        )

    def _number(self) -> float | None:
        try:
            return float(self.value)
        except ValueError:
            return None


class Filter(NamedTuple):
    """Rows for which all comparisons hold."""

    comparisons: tuple[Comparison, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are compared."""
        return tuple(dict.fromkeys(x.column for x in self.comparisons))

    def takes(self, partitions: dict[str, str]) -> bool:
        """Returns whether the comparisons of a file's partitions hold."""
        return all(
            bool(x.holds(pa.array([partitions[x.column]]))[0])
            for x in self.comparisons
            if x.column in partitions
        )

    def mask(self, block: Block) -> np.ndarray:
        """Returns which rows of a block all comparisons hold for."""
        mask = np.ones(len(block.rows), bool)
        for comparison in self.comparisons:
            mask &= comparison.holds(block.column(comparison.column))
        return mask


def is_filter(text: str) -> bool:
    """Returns whether a text is one of comparisons."""
    return all(_COMPARISON.fullmatch(part) for part in text.split(" and "))


def parse_filter(text: str, option: str) -> Filter:
    """Returns the filter of a text: comparisons with "and" between them.

    Raises:
        ValueError: if it is none.
    """
    matches = [_COMPARISON.fullmatch(part) for part in text.split(" and ")]
    found = [match for match in matches if match is not None]
    if len(found) < len(matches):
        raise ValueError(
            f"{option} {text!r} must be comparisons, as in 'dt<2026-11-13' or "
            "'dt>=2026-11-01 and dt<2026-11-13'."
        )
    return Filter(tuple(Comparison(*match.groups()) for match in found))


def _numbers(array: pa.Array) -> pa.Array | None:
    try:
        return array.cast(pa.float64(), safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
