"""Turns raw columns into numbers: parsing, what is done to bad values, the transform.

Bad values are counted by column. Text that is not a number, and with `--data.bad
strict` any bad value, ends the conversion with file, row and column.
"""

import contextlib
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from loka_jax.data import transforms
from loka_jax.data.blocks import NULL_WORDS, Block, as_dates, element_type, pc
from loka_jax.data.config import DataConfig
from loka_jax.data.reader import mix
from loka_jax.data.transform_options import Step
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

    def add_ids(self, column: str, ids: np.ndarray, unknown: pa.Array) -> None:
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
        total = sum(self._columns.values(), Counter())
        columns = {name: dict(counter) for name, counter in self._columns.items()}
        return {"totals": dict(total), "columns": columns}


class Numbers(NamedTuple):
    """A column of numbers.

    Attributes:
        values: float64; 0 where missing, while NaN and infinities are kept.
    """

    values: np.ndarray
    missing: np.ndarray
    block: Block
    name: str

    def refuse(self, wrong: np.ndarray, why: str) -> None:
        """Raises ValueError with the place of the first one that is wrong, and why."""
        if wrong.any():
            at = int(np.argmax(wrong))
            text = "no value" if self.missing[at] else f"{self.values[at]:g}"
            place = f"{self.block.file} row {self.block.rows[at]}"
            raise ValueError(f"{place} has {text} in {self.name}, {why}")


def parse_numbers(block: Block, column: str, kind: str, remedy: str) -> Numbers:
    """Returns the numbers of a column of some kind, such as dense."""
    array = block.column(column)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = _parse_text(block, column, array, remedy)
    type_ = array.type
    is_number = pa.types.is_integer(type_) or pa.types.is_floating(type_)
    if pa.types.is_boolean(type_):
        array = array.cast(pa.int8())
    elif not (is_number or pa.types.is_decimal(type_) or pa.types.is_null(type_)):
        if element_type(type_) != type_:
            remedy = "name the column with --data.multi"
        raise ValueError(
            f"{block.file} column {column!r} holds {clip(type_)}, not numbers: "
            f"{remedy}, or leave it out."
        )
    missing = np.asarray(array.is_null())
    array = pc.fill_null(array.cast(pa.float64(), safe=False), 0.0)
    values = np.asarray(array, np.float64)
    return Numbers(values, missing, block, f"{kind} column {column!r}")


def _parse_text(block: Block, column: str, array, remedy: str) -> pa.Array:
    array = pc.utf8_trim_whitespace(array)
    is_missing = pc.is_in(array, pa.array(MISSING_WORDS, array.type))
    array = pc.if_else(is_missing, pa.scalar(None, array.type), array)
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


def parse_labels(
    block: Block, columns: tuple[str, ...], *, may_lack: bool = False
) -> np.ndarray:
    """Returns the labels as float32: [rows] of one column, [rows, T] of several.

    Args:
        may_lack: a row may lack its label, which is NaN, as it may of several.
    """
    parts, has_several = [], len(columns) > 1
    may_lack |= has_several
    for column in columns:
        numbers = parse_numbers(block, column, "label", "write labels as 0 and 1")
        values = np.where(numbers.missing, np.nan, numbers.values)
        wrong = ~((values == 0) | (values == 1) | (may_lack & np.isnan(values)))
        why = "where only 0 and 1 are allowed: correct it or --data.label."
        numbers.refuse(wrong, why)
        parts.append(values.astype(np.float32))
    return np.stack(parts, axis=1) if has_several else parts[0]


def is_positive(labels: np.ndarray) -> np.ndarray:
    """Returns which rows have a label that is 1."""
    return (labels == 1).reshape(len(labels), -1).any(axis=1)


def parse_weights(
    block: Block, column: str, option: str = "--data.weight"
) -> np.ndarray:
    """Returns weights as float32."""
    remedy = f"name another column with {option}"
    numbers = parse_numbers(block, column, "weight", remedy)
    wrong = ~((numbers.values >= 0) & (numbers.values <= MAX_WEIGHT))
    why = f"where 0 to {MAX_WEIGHT:g} are allowed: correct it or {option}."
    numbers.refuse(numbers.missing | wrong, why)
    return numbers.values.astype(np.float32)


def parse_times(
    block: Block, column: str, *, may_lack: bool = False
) -> tuple[np.ndarray, bool]:
    """Returns the times in float64 and whether they are dates, in microseconds.

    Dates are Arrow's date and timestamp types, or text in the form of ISO 8601; without
    a zone they count as UTC.

    Args:
        may_lack: a row may lack its time, which is NaN.
    """
    array = block.column(column)
    if may_lack and array.type in (pa.string(), pa.large_string()):
        is_missing = pc.is_in(array, pa.array(MISSING_WORDS, array.type))
        array = pc.if_else(is_missing, pa.scalar(None, array.type), array)
    if (dates := as_dates(array)) is not None:
        micros = dates.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
        array = micros.cast(pa.float64(), safe=False)
    block = block._replace(table=pa.table({column: array}))
    numbers = parse_numbers(block, column, "time", "name another with --data.time")
    if may_lack:
        return np.where(numbers.missing, np.nan, numbers.values), dates is not None
    wrong = numbers.missing | ~np.isfinite(numbers.values)
    why = "where each row needs a time: add it, or leave out --data.time."
    numbers.refuse(wrong, why)
    return numbers.values, dates is not None


def parse_instants(block: Block, column: str) -> np.ndarray:
    """Returns times in seconds, as `transforms.ids` takes them; NaN where missing."""
    values, is_date = parse_times(block, column, may_lack=True)
    return values * (1e-6 if is_date else 1.0)


def clean_dense(
    block: Block, config: DataConfig, counts: Counts
) -> dict[str, np.ndarray]:
    """Returns the dense columns in float64: NaN where missing, no bad values else."""
    out = {}
    for column in config.inputs.numbers:
        remedy = "name the column with --data.categorical"
        numbers = parse_numbers(block, column, "dense", remedy)
        values = numbers.values
        is_nan, is_inf = np.isnan(values), np.isinf(values)
        huge = (np.abs(values) > MAX_DENSE) & ~is_inf
        bad = {"missing": numbers.missing, "nan": is_nan, "inf": is_inf, "huge": huge}
        for kind, where in bad.items():
            if config.bad == "strict":
                numbers.refuse(
                    where,
                    "which --data.bad strict refuses: correct it or set --data.bad "
                    "clean.",
                )
            counts.add(column, kind, int(np.count_nonzero(where)))
        counts.add(column, "negative", int(np.count_nonzero(values < 0)))
        values = np.where(numbers.missing, np.nan, values)
        out[column] = np.clip(values, -MAX_DENSE, MAX_DENSE)
    return out


class Sample:
    """Rows drawn evenly from all, in bounded memory: those of the lowest hashes."""

    def __init__(self, num_columns: int, size: int = 1 << 17):
        """Starts with no rows, and keeps so many."""
        self._size, self._count = size, 0
        self._keys = np.empty(0, np.uint64)
        self._rows = np.empty((0, num_columns))

    def add(self, rows: np.ndarray) -> None:
        """Adds rows, whose numbers are hashed, whatever the blocks that they are in."""
        number = np.arange(self._count, self._count + len(rows), dtype=np.uint64)
        self._count += len(rows)
        keys = np.concatenate([self._keys, mix(number)])
        lowest = np.argsort(keys)[: self._size]
        self._keys, rows = keys[lowest], np.concatenate([self._rows, rows])
        self._rows = rows[lowest]

    def constants(self, place: int, steps: tuple[Step, ...]) -> tuple[float, ...]:
        """Returns what the last of an input's steps needs to know of a column."""
        values, (*before, (name, *numbers)) = self._rows[:, place], steps
        if name == "buckets":
            values = values[~np.isnan(values)]
            shares = np.arange(1, numbers[0]) / numbers[0]
            method = "inverted_cdf"  # which is one of the values
            cuts = np.quantile(values, shares, method=method) if len(values) else []
            return tuple(x for x in np.unique(cuts).tolist() if x < values.max())
        x = transforms.dense(values, before)
        mean, std = (float(x.mean()), float(x.std())) if len(x) else (0.0, 1.0)
        # Rounding gives a constant column a deviation of about 1e-16 of its mean.
        return mean, std if std > 1e-12 * abs(mean) else 1.0
