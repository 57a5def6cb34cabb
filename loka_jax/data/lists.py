"""Multi-valued columns: lists of values, and of their weights, as flat arrays.

A list comes from Parquet or from text with a separator. A missing list is an empty one;
a missing or empty value in a list is left out.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loka_jax.data.blocks import Block, element_type, list_lengths
from loka_jax.data.encoding import is_missing, text_of
from loka_jax.data.values import MAX_WEIGHT, MISSING_WORDS
from loka_jax.terminal import shown

PADDING = -1  # in place of an id


class Lists(NamedTuple):
    """The lists of some rows.

    Attributes:
        values: the values of all lists, as text.
        lengths: int64, the number of values of each row.
        weights: float32, of each value; None if all are 1.
        missing: the number of values that were left out.
    """

    values: pa.Array
    lengths: np.ndarray
    weights: np.ndarray | None
    missing: int


def read_lists(
    block: Block,
    column: str,
    weights: str | None,
    separator: str | None,
    *,
    as_written: bool = False,
) -> Lists:
    """Returns the lists of a multi-valued column.

    Args:
        block: raw rows.
        column: the column of values.
        weights: the column of their weights; None if all are 1.
        separator: what stands between values if the column holds text.
        as_written: whether NULL is a value, as in earlier versions.

    Raises:
        ValueError: with file, row and column, if text has no separator, a value has no
            text form, or the weights are not as many as the values, or no weights.
    """
    raw, lengths = _flat(block, column, separator)
    values = text_of(raw, block, column)
    missing = values.is_null() if as_written else is_missing(values)
    present = ~np.asarray(missing)
    row = np.repeat(np.arange(len(lengths)), lengths)
    numbers = None
    if weights is not None:
        numbers, counts = _flat(block, weights, separator)
        _check_lengths(block, column, weights, lengths, counts)
        numbers = _numbers(block, weights, numbers, row, present)[present]
    return Lists(
        values=values.filter(pa.array(present)),
        lengths=np.bincount(row[present], minlength=len(lengths)),
        weights=numbers,
        missing=int(np.count_nonzero(~present)),
    )


def padded(flat: np.ndarray, lengths: np.ndarray, slots: int, fill) -> np.ndarray:
    """Returns `[rows, slots]` with the first `slots` of each list, then `fill`."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out = np.full((len(lengths), slots), fill, flat.dtype)
    fits = place < slots
    out[row[fits], place[fits]] = flat[fits]
    return out


def _flat(
    block: Block, column: str, separator: str | None
) -> tuple[pa.Array, np.ndarray]:
    """Returns the elements of all lists, and the length of each list."""
    array = block.column(column)
    if element_type(array.type) == array.type:
        if separator is None:
            raise ValueError(
                f"{block.file} column {column!r} holds {shown(array.type)}, no lists: "
                "name what stands between the values with --data.separator, as in '|'."
            )
        array = pc.split_pattern(text_of(array, block, column), separator)
    return pc.list_flatten(array), list_lengths(array)


def _check_lengths(
    block: Block, column: str, weights: str, lengths: np.ndarray, counts: np.ndarray
) -> None:
    if (differ := lengths != counts).any():
        at = int(np.argmax(differ))
        raise ValueError(
            f"{block.file} row {block.rows[at]} has {lengths[at]} values in column "
            f"{column!r} and {counts[at]} weights in {weights!r}: give each value one "
            "weight."
        )


def _numbers(
    block: Block, column: str, array: pa.Array, row: np.ndarray, present: np.ndarray
) -> np.ndarray:
    """Returns the weights of values as float32, after checking those of real values."""
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = pc.utf8_trim_whitespace(array)
        words = pa.array(MISSING_WORDS, array.type)
        array = pc.if_else(pc.is_in(array, words), pa.scalar(None, array.type), array)
    try:
        numbers = pc.fill_null(array.cast(pa.float64(), safe=False), np.nan)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise ValueError(
            f"{block.file} column {column!r} holds values that are no numbers, as the "
            "weights of --data.multi-weights must be: correct it, or name another."
        ) from None
    numbers = np.asarray(numbers)
    wrong = present & ~((numbers >= 0) & (numbers <= MAX_WEIGHT))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"{block.file} row {block.rows[row[at]]} has the weight {numbers[at]:g} in "
            f"column {column!r}, where 0 to {MAX_WEIGHT:g} are allowed and none may be "
            "missing: correct it, or leave out --data.multi-weights."
        )
    return numbers.astype(np.float32)
