"""Turns raw columns into numbers: parsing, what is done to bad values, the transform.

Bad values are counted by column. Text that is not a number, and with `--data.bad
strict` any bad value, ends the conversion with file, row and column.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)

import contextlib
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loka_jax.data.blocks import NULL_WORDS, Block, element_type
from loka_jax.data.config import DataConfig
from loka_jax.terminal import clip

# Spellings of a missing value in a dense column. Categorical columns keep those that
# are no NULL_WORDS: NA may be Namibia. `nan` is parsed, and counted as NaN.
MISSING_WORDS = ("", "NA", "N/A", "None", *NULL_WORDS)

# Of an example; sums over a data set stay finite in float32.
MAX_WEIGHT = 1e12
MAX_DENSE = 1e12  # larger absolute values are bad ones


class Counts:
    """Counts missing, unknown and unusual values by column."""

    def __init__(self):
        """Starts at zero."""
        self._columns: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._known: set[str] = set()  # columns with a value that has an id
        self._unknown: defaultdict[str, set[str]] = defaultdict(set)  # of the others

    def of(self, column: str) -> Counter[str]:
        """Returns the counts of a column."""
        return self._columns.get(column, Counter())

    def add_ids(self, column: str, ids: np.ndarray, unknown: pa.ChunkedArray) -> None:
        """Counts a column's values without an id, which are given."""
        self.add(column, "oov", len(unknown))
        if ids.any():
            self._known.add(column)
        elif column not in self._known:
            self._unknown[column].update(unknown.slice(0, 1000).to_pylist())

    def warnings(self, which: str) -> list[str]:
        """Returns a sentence on each column with several values, all of them unknown.

        One value may well be new, as that of a new user is. `which` names the rows.
        """
        return [
            f"Warning: no value of column {clip(repr(column))} in {which} is in the "
            "vocabulary, so that all rows read the row of id 0: check that it holds "
            "what the training rows hold, in the same spelling."
            for column, values in self._unknown.items()
            if column not in self._known and len(values) > 1
        ]

    def add(self, column: str, kind: str, count: int) -> None:
        """Adds to a kind's count (missing, nan, inf, huge, negative, oov)."""
        if count:
            self._columns[column][kind] += int(count)

    def report(self) -> dict:
        """Returns the counts in total and by column, as JSON values."""
        total: Counter[str] = Counter()
        for counter in self._columns.values():
            total.update(counter)
        columns = {name: dict(counter) for name, counter in self._columns.items()}
        return {"totals": dict(total), "columns": columns}


class Standardizer(NamedTuple):
    """Mean and standard deviation of each dense column over the training rows."""

    mean: np.ndarray
    std: np.ndarray


def parse_numbers(
    block: Block, column: str, remedy: str = "name the column with --data.categorical"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the column's values as float64, and a mask of the missing ones.

    Missing values are 0; NaN and infinities are kept.

    Raises:
        ValueError: with file and row, if a value is no number; it ends with `remedy`.
    """
    array = block.column(column)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = _parse_text(block, column, array, remedy)
    kind = array.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    elif not (is_number or pa.types.is_decimal(kind) or pa.types.is_null(kind)):
        if element_type(kind) != kind:
            remedy = "name the column with --data.multi"
        raise ValueError(
            f"{block.file} column {column!r} holds {clip(kind)}, not numbers: "
            f"{remedy}, or leave it out."
        )
    missing = np.asarray(array.is_null())
    array = pc.fill_null(array.cast(pa.float64(), safe=False), 0.0)
    return np.asarray(array, np.float64), missing


def without_missing(array: pa.Array) -> pa.Array:
    """Returns texts without white space around them, null for a missing number."""
    array = pc.utf8_trim_whitespace(array)
    words = pa.array(MISSING_WORDS, array.type)
    return pc.if_else(pc.is_in(array, words), pa.scalar(None, array.type), array)


def _parse_text(block: Block, column: str, array, remedy: str) -> pa.Array:
    array = without_missing(array)
    with contextlib.suppress(pa.ArrowInvalid):
        return array.cast(pa.float64())
    words = pa.array(["false", "true"], array.type)
    truth = pc.index_in(pc.utf8_lower(array), words, skip_nulls=True)
    array = pc.coalesce(truth.cast(array.type), array)
    try:
        return array.cast(pa.float64())
    except pa.ArrowInvalid:
        at = next(i for i, value in enumerate(array) if not _is_number(value))
        raise ValueError(
            f"{block.file} row {block.rows[at]} column {column!r} holds "
            f"{str(array[at])[:40]!r}, not a number: correct it, or {remedy}."
        ) from None


def _is_number(value: pa.Scalar) -> bool:
    try:
        value.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def refuse_first(
    wrong: np.ndarray,
    block: Block,
    column: str,
    values: np.ndarray,
    missing: np.ndarray,
    why: str,
) -> None:
    """Raises ValueError with file, row and value of the first one that is wrong.

    Args:
        wrong: which values are.
        block: the rows.
        column: the column in words.
        values: the numbers of the rows.
        missing: which of them are missing.
        why: the end of the sentence, with the remedy.
    """
    if wrong.any():
        at = int(np.argmax(wrong))
        text = "no value" if missing[at] else f"{values[at]:g}"
        raise ValueError(
            f"{block.file} row {block.rows[at]} has {text} in {column}, {why}"
        )


def parse_labels(block: Block, columns: tuple[str, ...]) -> np.ndarray:
    """Returns the labels as float32: [rows] of one column, [rows, T] of several.

    Where there are several, a row may lack some: these are NaN.

    Raises:
        ValueError: with file, row and value, if one is not 0 or 1.
    """
    if len(columns) == 1:
        return _parse_label(block, columns[0], may_lack=False)
    parts = [_parse_label(block, column, may_lack=True) for column in columns]
    return np.stack(parts, axis=1)


def is_positive(labels: np.ndarray) -> np.ndarray:
    """Returns which rows have a label that is 1."""
    return (labels == 1).reshape(len(labels), -1).any(axis=1)


def _parse_label(block: Block, column: str, *, may_lack: bool) -> np.ndarray:
    remedy = "write labels as 0 and 1"
    values, missing = parse_numbers(block, column, remedy)
    if may_lack:
        values, missing = np.where(missing, np.nan, values), np.zeros_like(missing)
    wrong = missing | ~((values == 0) | (values == 1) | (may_lack & np.isnan(values)))
    refuse_first(
        *(wrong, block, f"label column {column!r}", values, missing),
        "where only 0 and 1 are allowed: correct it or --data.label.",
    )
    return values.astype(np.float32)


def parse_weights(block: Block, column: str) -> np.ndarray:
    """Returns the weights of examples as float32.

    Raises:
        ValueError: with file, row and value, if one is missing, negative, NaN or larger
            than `MAX_WEIGHT`.
    """
    remedy = "name another column with --data.weight"
    values, missing = parse_numbers(block, column, remedy)
    wrong = missing | ~((values >= 0) & (values <= MAX_WEIGHT))
    refuse_first(
        *(wrong, block, f"weight column {column!r}", values, missing),
        f"where 0 to {MAX_WEIGHT:g} are allowed: correct it or --data.weight.",
    )
    return values.astype(np.float32)


def clean_dense(
    block: Block, config: DataConfig, columns: tuple[str, ...], counts: Counts
) -> np.ndarray:
    """Returns the dense columns [rows, n] in float64, bad values made good."""
    out = np.empty((block.table.num_rows, len(columns)))
    for j, column in enumerate(columns):
        out[:, j] = _clean_column(block, config, column, counts)
    return out


def _clean_column(
    block: Block, config: DataConfig, column: str, counts: Counts
) -> np.ndarray:
    values, missing = parse_numbers(block, column)
    is_nan, is_inf = np.isnan(values), np.isinf(values)
    huge = (np.abs(values) > MAX_DENSE) & ~is_inf
    bad = {"missing": missing, "nan": is_nan, "inf": is_inf, "huge": huge}
    for kind, where in bad.items():
        if config.bad == "strict":
            refuse_first(
                *(where, block, f"dense column {column!r}", values, missing),
                "which --data.bad strict refuses: correct it or set --data.bad clean.",
            )
        counts.add(column, kind, int(np.count_nonzero(where)))
    counts.add(column, "negative", int(np.count_nonzero(values < 0)))
    return np.clip(np.where(is_nan, 0.0, values), -MAX_DENSE, MAX_DENSE)


def transform_dense(
    values: np.ndarray, config: DataConfig, standardizer: Standardizer
) -> np.ndarray:
    """Returns the model's float32 input; finite values stay finite."""
    if config.transform == "log1p":
        values = np.copysign(np.log1p(np.abs(values)), values)
    elif config.transform == "standardize":
        values = (values - standardizer.mean) / standardizer.std
    return values.astype(np.float32)


class Range:
    """The smallest and the largest input of each dense column, block by block."""

    def __init__(self, num_columns: int):
        """Starts with no rows."""
        self._low = np.full(num_columns, np.inf)
        self._high = np.full(num_columns, -np.inf)

    def add(self, inputs: np.ndarray) -> None:
        """Adds rows."""
        self._low = np.minimum(self._low, inputs.min(axis=0, initial=np.inf))
        self._high = np.maximum(self._high, inputs.max(axis=0, initial=-np.inf))

    def only_value(self, column: int) -> float | None:
        """Returns the input of all rows, or None if they differ."""
        low, high = self._low[column], self._high[column]
        return float(low) if low == high else None


def nothing_left(
    counts: Counter[str], rows: int, only: float | None, config: DataConfig
) -> str | None:
    """Returns why a dense column tells rows apart no more, or None if it does.

    `counts` are those of the column; `only` is the input of all rows, if they are
    equal.
    """
    if rows < 2:
        return None
    if counts["missing"] + counts["nan"] == rows:
        return "all its values are missing"
    if counts["huge"] + counts["inf"] == rows:
        return f"all its values lie beyond {MAX_DENSE:g}"
    if only is None:
        return None
    return f"it is constant, {only:g} after --data.transform {config.transform}"


class Moments:
    """Accumulates means and standard deviations block by block, in float64."""

    def __init__(self, num_columns: int):
        """Starts with no rows."""
        self._count = 0
        self._mean = np.zeros(num_columns)
        self._squares = np.zeros(num_columns)  # sum of squared deviations

    def add(self, values: np.ndarray) -> None:
        """Adds rows by the pairwise update, which avoids cancellation."""
        count = len(values)
        if not count:
            return
        mean = values.mean(axis=0)
        total = self._count + count
        shift = mean - self._mean
        self._squares += ((values - mean) ** 2).sum(axis=0)
        self._squares += shift**2 * (self._count * count / total)
        self._mean = self._mean + shift * (count / total)
        self._count = total

    def result(self) -> Standardizer:
        """Returns means and standard deviations, 1 for constant columns."""
        std = np.sqrt(self._squares / max(self._count, 1))
        # Rounding gives a constant column a deviation of about 1e-16 of its mean.
        constant = std <= 1e-12 * np.abs(self._mean)
        return Standardizer(self._mean, np.where(constant, 1.0, std))
