"""Categorical values as text, one a row or in lists.

Values are compared as text. Integers, text and whole float64 have the same; columns of
other types have a form of their own (`text_form`), which an encoding remembers.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loka_jax.data.blocks import NULL_WORDS, Block, element_type, list_lengths
from loka_jax.data.config import DataConfig
from loka_jax.data.values import parse_weights
from loka_jax.terminal import clip


class Texts(NamedTuple):
    """The values of a field in some rows.

    Attributes:
        values: of all rows, one after another; null where the only one is missing.
        lengths: int64, the number of values of each row; None if each has one.
        missing: the number of values that were left out of lists.
        weights: float32, of each value; None if all are 1.
    """

    values: pa.Array
    lengths: np.ndarray | None = None
    missing: int = 0
    weights: np.ndarray | None = None


def read_texts(
    block: Block, column: str, config: DataConfig, *, with_weights: bool = True
) -> Texts:
    """Returns the values of a field, and those of a multi-valued one with weights."""
    if column not in config.multi:
        return Texts(as_text(block, column))
    elements, lengths = _elements(block, column, config.separator)
    values = as_text(elements, column)
    present = ~np.asarray(is_missing(values))
    weights = None
    if with_weights and (name := config.weights_of_multi.get(column)) is not None:
        weighted, counts = _elements(block, name, config.separator)
        if (differ := lengths != counts).any():
            at = int(np.argmax(differ))
            raise ValueError(
                f"{block.file} row {block.rows[at]} has {lengths[at]} values in column "
                f"{column!r} and {counts[at]} weights in {name!r}: give each value one "
                "weight."
            )
        weights = parse_weights(weighted.filter(present), name, "--data.multi-weights")
    row = np.repeat(np.arange(len(lengths)), lengths)
    return Texts(
        values=values.filter(pa.array(present)),
        lengths=np.bincount(row[present], minlength=len(lengths)),
        missing=int(np.count_nonzero(~present)),
        weights=weights,
    )


def _elements(
    block: Block, column: str, separator: str | None
) -> tuple[Block, np.ndarray]:
    """Returns the elements of all lists, each as a row, and the length of each list."""
    array = block.column(column)
    if element_type(array.type) == array.type:
        if separator is None:
            raise ValueError(
                f"{block.file} column {column!r} holds {clip(array.type)}, no lists: "
                "name what stands between the values with --data.separator, as in '|'."
            )
        array = pc.split_pattern(as_text(block, column), separator)
    lengths = list_lengths(array)
    table = pa.table({column: pc.list_flatten(array)})
    return Block(table, np.repeat(block.rows, lengths), block.file), lengths


def as_text(block: Block, column: str) -> pa.Array:
    """Returns a column's values as strings, and missing ones (empty, NaN) as null."""
    array = block.column(column)
    if pa.types.is_floating(array.type):
        _check_exact(array, block, column)
        array = _floats_as_text(array.cast(pa.float64()))
    if _is_binary(array.type):
        array = pa.array([v and v.hex() for v in array.to_pylist()], pa.string())
    if element_type(array.type) != array.type:
        raise ValueError(
            f"{block.file} column {column!r} holds {clip(array.type)}, no single "
            "values: name it with --data.multi, or leave it out."
        )
    try:
        array = array.cast(pa.large_string())  # a column can exceed 2 GiB of text
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        raise ValueError(
            f"{block.file} column {column!r} holds {array.type}, which cannot be "
            "written as text: leave it out, or convert it first."
        ) from None
    return pc.if_else(pc.equal(array, ""), pa.scalar(None, array.type), array)


def _is_binary(kind: pa.DataType) -> bool:
    is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return is_binary or pa.types.is_fixed_size_binary(kind)


def is_missing(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Returns which texts are null or a spelling of it."""
    words = pa.array([None, *NULL_WORDS], values.type)
    return pc.is_in(values, value_set=words)


def text_form(kind: pa.DataType) -> str | None:
    """Returns how values of a type, or of lists of it, are written as text.

    Two columns of one form write equal values alike; those of different forms need not:
    a boolean is true here, and True in a CSV file. None for the type without values.
    """
    kind = element_type(kind)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_whole = pa.types.is_integer(kind) or pa.types.is_float64(kind)
    if is_text or is_whole or (pa.types.is_decimal(kind) and kind.scale == 0):
        return "text, integers or float64"
    if pa.types.is_decimal(kind):
        return f"decimals of scale {kind.scale}"
    if _is_binary(kind):
        return "binary"
    return None if pa.types.is_null(kind) else str(kind)


def _check_exact(array: pa.Array, block: Block, column: str) -> None:
    """Raises ValueError for a float at which not every integer is one."""
    bits = {16: 11, 32: 24, 64: 53}[array.type.bit_width]
    largest = pc.max(pc.abs(array.cast(pa.float64()))).as_py() or 0.0
    if largest >= 2**bits:
        raise ValueError(
            f"{block.file} column {column!r} holds {largest:.17g} as {array.type}, "
            f"which cannot hold an id of 2^{bits} or more: write integers or text."
        )


def _floats_as_text(array: pa.Array) -> pa.Array:
    """Returns floats as text: whole numbers without a point, NaN as null.

    pandas stores integer columns that have missing values as floats.
    """
    array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    whole = pc.and_(pc.equal(array, pc.round(array)), pc.less(pc.abs(array), 2**53))
    integers = pc.if_else(whole, array, pa.scalar(0.0)).cast(pa.int64())
    return pc.if_else(whole, integers.cast(pa.string()), array.cast(pa.string()))
