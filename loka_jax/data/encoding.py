"""Maps texts to ids, by a vocabulary of the training rows or by a stable hash.

Id 0 stands for missing values and, with a vocabulary, for values seen fewer than
`min_count` times in training.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)

import hashlib
import re
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loka_jax.data.blocks import NULL_WORDS
from loka_jax.data.config import DataConfig
from loka_jax.data.texts import is_missing

# The texts of floats that are integers: those below 9e15, so that each has its own, and
# larger ones.
_WHOLE = re.compile(r"(-?[0-8]?[0-9]{1,15})\.0")
LARGE_FLOAT = r"^-?((9[0-9]{15}|[0-9]{17,})\.0|[0-9](\.[0-9]+)?[eE]\+[0-9]+)$"
NO_INTEGER = -1  # in place of an id


@runtime_checkable
class Encoder(Protocol):
    """Turns the values of one field into ids.

    Attributes:
        rows: the number of rows of the field's table, including id 0.
    """

    rows: int

    def encode(self, values: pa.Array) -> np.ndarray:
        """Returns int32 ids in [0, rows); 0 for null and unknown values."""
        ...


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


def hash_encoder(config: DataConfig, column: str) -> Encoder | None:
    """Returns the encoder of a hashed column, or None if it has a vocabulary."""
    rows = config.hash_rows(column)
    if rows is None:
        return None
    if column in config.hashed:
        return ModuloEncoder(rows)
    return HashEncoder(column, rows)
