"""Categorical values as text, one a row or in lists, and texts as ids.

Values are compared as text. Integers, text and whole float64 have the same; columns of
other types have a form of their own (`text_form`), which an encoding remembers. Ids are
those of a vocabulary of the training rows, or a stable hash. Id 0 stands for missing
values and, with a vocabulary, for values seen fewer than `min_count` times in training.
"""

import hashlib
import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from loka_jax.data.blocks import NULL_WORDS, Block, element_type, list_lengths, pc
from loka_jax.data.config import DataConfig
from loka_jax.data.transform_options import Input
from loka_jax.data.values import parse_weights
from loka_jax.terminal import clip

# The texts of floats that are integers: those below 9e15, so that each has its own, and
# larger ones.
_WHOLE = re.compile(r"(-?[0-8]?[0-9]{1,15})\.0")
LARGE_FLOAT = r"^-?((9[0-9]{15}|[0-9]{17,})\.0|[0-9](\.[0-9]+)?[eE]\+[0-9]+)$"
NO_INTEGER = -1  # in place of an id


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
    elements, lengths = elements_of(block, column, config.separator)
    values = as_text(elements, column)
    present = ~np.asarray(is_missing(values))
    weights = None
    if with_weights and (name := config.weights_of_multi.get(column)) is not None:
        weighted, counts = elements_of(block, name, config.separator)
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


def elements_of(
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


def user_keys(block: Block, column: str) -> np.ndarray:
    """Returns a 64-bit key of each row's user, int64: a hash of its text.

    Raises:
        ValueError: for a row without a user.
    """
    coded = pc.dictionary_encode(as_text(block, column))
    if coded.null_count:
        at = int(np.argmax(np.asarray(coded.is_null())))
        raise ValueError(
            f"{block.file} row {block.rows[at]} has no user in column {column!r}: add "
            "it, or leave the row out."
        )
    digests = (
        hashlib.blake2b(text.encode(), digest_size=8).digest()
        for text in coded.dictionary.to_pylist()
    )
    keys = np.frombuffer(b"".join(digests), "<i8")
    return keys[np.asarray(coded.indices)]


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


class ValueCounter:
    """Counts the values of one field, block by block.

    Attributes:
        merged_bytes: the size of the different values found so far.
    """

    def __init__(self, merge_bytes: int = 1 << 24):
        """Starts with no values; so many bytes of counts are kept before a merge."""
        self.merged_bytes = 0
        self._merge_bytes = merge_bytes
        self._parts = [
            pa.table(
                {"value": pa.array([], pa.large_string()), "count": pa.array([], "i8")}
            )
        ]
        self._new_bytes = 0

    def add(self, values: pa.Array) -> None:
        """Adds values; nulls are ignored."""
        counted = pc.value_counts(values.drop_null())
        table = pa.table({"value": counted.field(0), "count": counted.field(1)})
        self._parts.append(table)
        self._new_bytes += table.nbytes
        # A large vocabulary is not merged at every block.
        if self._new_bytes > max(self._merge_bytes, self.merged_bytes // 2):
            merged = self._merged()
            self._parts = [merged]
            self.merged_bytes, self._new_bytes = merged.nbytes, 0

    def _merged(self) -> pa.Table:
        table = pa.concat_tables(self._parts).group_by("value")
        return table.aggregate([("count", "sum")]).rename_columns(["value", "count"])

    def ranked(self) -> pa.Table:
        """Returns the columns `value` and `count`, the most frequent values first."""
        order = [("count", "descending"), ("value", "ascending")]
        return self._merged().sort_by(order)


def frequent(ranked: pa.Table, min_count: int) -> pa.Array:
    """Returns the values that were counted `min_count` times or more, in order."""
    is_frequent = pc.greater_equal(ranked["count"], min_count)
    return ranked["value"].filter(is_frequent).combine_chunks()


class VocabularyEncoder:
    """Encodes by frequency rank: id 1 is the most frequent training value.

    Attributes:
        values: the vocabulary; `values[i]` has id i + 1.
        reserved: the rows after these, for values of later days.
        rows: the number of rows of the field's table, including id 0.
    """

    def __init__(self, values: pa.Array, reserved: int = 0):
        """Takes the vocabulary, without an entry for unknown values."""
        self.values, self.reserved = values, reserved
        self.rows = len(values) + 1 + reserved

    def encode(self, values: pa.Array) -> np.ndarray:
        """Returns int32 ids in [0, rows); 0 for null and unknown values.

        A whole number that has no id has that of its other spelling, 7 or 7.0: pandas
        writes integers beside missing values as floats.
        """
        ids = self._exact_ids(values)
        if (unknown := (ids == 0) & np.asarray(values.is_valid())).any():
            others = _other_spelling(values.filter(pa.array(unknown)))
            ids[unknown] = self._exact_ids(others)
        return ids

    def _exact_ids(self, values: pa.Array) -> np.ndarray:
        index = pc.index_in(values, value_set=self.values, skip_nulls=True)
        return np.asarray(pc.fill_null(index, -1), np.int32) + np.int32(1)


def _other_spelling(values: pa.Array) -> pa.Array:
    """Returns 7 for 7.0, 7.0 for 7, and what is no whole number as it is."""
    whole = pc.replace_substring_regex(values, f"^{_WHOLE.pattern}$", r"\1")
    point = pc.replace_substring_regex(values, r"^(-?[0-8]?[0-9]{1,15})$", r"\1.0")
    return pc.if_else(pc.equal(whole, values), point, whole)


class HashEncoder:
    """Encodes by hash: `1 + blake2b64(field, value) mod (rows - 1)`.

    The ids are the same on every machine and in every run, and differ between fields
    that share values.
    """

    def __init__(self, field: str, rows: int):
        """Takes the field's name, part of the hash, and the rows of its table."""
        self._salt = hashlib.blake2b(field.encode(), digest_size=16).digest()
        self.rows = rows

    def encode(self, values: pa.Array) -> np.ndarray:
        """Returns int32 ids in [0, rows); 0 for null values."""
        coded = pc.dictionary_encode(values)
        ids = np.zeros(len(coded.dictionary) + 1, np.int32)  # the last is for null
        for i, value in enumerate(coded.dictionary.to_pylist()):
            ids[i] = self._id(value)
        return ids[np.asarray(pc.fill_null(coded.indices, len(ids) - 1))]

    def _id(self, value: str) -> int:
        if value in NULL_WORDS:
            return 0
        value = value[:-2] if _WHOLE.fullmatch(value) else value
        digest = hashlib.blake2b(value.encode(), digest_size=8, key=self._salt).digest()
        return 1 + int.from_bytes(digest, "little") % (self.rows - 1)


class ModuloEncoder:
    """Encodes integers that are hashes already: `1 + (h mod 2^64) mod (rows - 1)`.

    A negative number has the id of the unsigned one with the same 64 bits. Text may be
    hexadecimal, as 0x1f.
    """

    def __init__(self, rows: int):
        """Takes the rows of the field's table."""
        self.rows = rows

    def encode(self, values: pa.Array) -> np.ndarray:
        """Returns int32 ids: 0 for null values, `NO_INTEGER` for no 64-bit integer."""
        wrong = np.zeros(len(values), bool)
        try:
            numbers = values.cast(pa.int64())
            hashes = np.asarray(pc.fill_null(numbers, 0)).view(np.uint64)
        except pa.ArrowInvalid:  # 2^63 or more, or no integer
            bits = [_bits(value) for value in values.to_pylist()]
            wrong = np.array([x is None for x in bits])
            hashes = np.array([x or 0 for x in bits], np.uint64)
        ids = 1 + (hashes % np.uint64(self.rows - 1)).astype(np.int32)
        ids[np.asarray(is_missing(values))] = 0
        return np.where(wrong, np.int32(NO_INTEGER), ids)


def _bits(value: str | None) -> int | None:
    """Returns the 64 bits of an integer as an unsigned one, None if it is none."""
    if value is None or value in NULL_WORDS:
        return 0
    is_hex = re.fullmatch("0[xX][0-9a-fA-F]{1,16}", value)
    if not is_hex and not re.fullmatch("-?[0-9]{1,20}", value):
        return None
    number = int(value, 16 if is_hex else 10)
    return number % 2**64 if -(2**63) <= number < 2**64 else None


# Turns the texts of a field into int32 ids below `rows`; 0 is for null and unknown. An
# `Input` is a part of a number or time.
type Encoder = VocabularyEncoder | HashEncoder | ModuloEncoder | Input


def hash_encoder(config: DataConfig, column: str) -> Encoder | None:
    """Returns the encoder of a hashed column, or None if it has a vocabulary."""
    rows = config.hash_rows(column)
    if rows is None:
        return None
    if column in config.hashed:
        return ModuloEncoder(rows)
    return HashEncoder(column, rows)
