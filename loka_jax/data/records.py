"""Turns raw rows into the records that models read, the same way at every time.

An `Encoding` is learned from training rows once. A conversion, a later day and a
prediction all go through `Encoding.records`, so equal rows give equal inputs.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loka_jax.data.batch import Columns, Schema
from loka_jax.data.blocks import Block, element_type, list_lengths
from loka_jax.data.config import DataConfig, columns_of
from loka_jax.data.encoding import (
    LARGE_FLOAT,
    Encoder,
    NoInteger,
    as_text,
    is_missing,
    text_form,
    text_of,
)
from loka_jax.data.shards import record_dtype_of
from loka_jax.data.values import (
    MAX_WEIGHT,
    Counts,
    Standardizer,
    clean_dense,
    parse_labels,
    parse_weights,
    transform_dense,
    without_missing,
)
from loka_jax.terminal import clip


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How raw columns become inputs of a model.

    Attributes:
        config: the columns and the policies for their values.
        encoders: the encoder of each field.
        standardizer: of the dense columns; used by `transform="standardize"` only.
        slots: the most values in a list of each multi-valued column.
        forms: how the training values of each table were written as text, see
            `text_form`.
    """

    config: DataConfig
    encoders: tuple[Encoder, ...]
    standardizer: Standardizer
    slots: tuple[int, ...] = ()
    forms: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> Columns:
        """The names of the columns."""
        return columns_of(self.config)

    @property
    def schema(self) -> Schema:
        """The columns and table sizes."""
        sizes = tuple(encoder.rows for encoder in self.encoders)
        return Schema(
            **vars(self.columns),
            vocab_sizes=sizes,
            owners=self._owners(),
            slots=self.slots,
            weighted_multi=tuple(self.config.weights_of_multi),
            weighted=self.config.is_weighted,
        )

    def _owners(self) -> tuple[str, ...]:
        owners = self.config.owners
        fields = self.columns.fields
        return tuple(owners.get(name, name) for name in fields) if owners else ()

    def records(
        self,
        blocks: list[Block],
        counts: Counts,
        *,
        with_labels: bool = True,
        unknown_refusal: str | None = None,
    ) -> np.ndarray:
        """Returns the rows of all blocks as records of `record_dtype`, in their order.

        Args:
            blocks: raw rows.
            counts: counts the values that policies apply to, and the unknown ones.
            with_labels: whether the blocks have the label column, and that of the
                weights; labels are 0 and weights 1 if not.
            unknown_refusal: what is wrong with a value that has no id, as the end of a
                sentence; None if it gets id 0.

        Raises:
            ValueError: with file, row and column of a value that is refused.
        """
        columns = self.columns
        sizes = [block.table.num_rows for block in blocks]
        records = np.zeros(sum(sizes), record_dtype_of(self.schema))
        if self.config.is_weighted:
            records["weight"] = 1
        start = 0
        for block, size in zip(blocks, sizes, strict=True):
            rows = records[start : start + size]
            if with_labels:
                rows["label"] = parse_labels(block, columns.labels)
                if self.config.weight is not None:
                    rows["weight"] = parse_weights(block, self.config.weight)
            dense = clean_dense(block, self.config, columns.dense, counts)
            rows["dense"] = transform_dense(dense, self.config, self.standardizer)
            start += size
            self._check_forms(block)
        for field, column in enumerate(columns.categorical):
            values = pa.chunked_array([as_text(block, column) for block in blocks])
            where = _Where(blocks, column)
            ids = self._ids(values, field, where, counts, unknown_refusal)
            records["ids"][:, field] = ids
        for number in range(len(columns.multi)):
            self._fill_bag(records, blocks, number, counts, unknown_refusal)
        return records

    def _check_forms(self, block: Block) -> None:
        """Raises ValueError for values whose text may be another than in training."""
        for column in self.columns.fields:
            trained = self.forms.get(self.config.owners.get(column, column))
            if trained is None:
                continue
            array = block.column(column)
            is_other = text_form(array.type) not in (None, trained)
            if is_other and array.null_count < len(array):
                raise ValueError(
                    f"{block.file} column {column!r} holds {clip(array.type)}, and "
                    f"the training rows {clip(trained)}, where equal values may be "
                    "written in another way: convert it."
                )

    def _fill_bag(
        self,
        records: np.ndarray,
        blocks: list[Block],
        number: int,
        counts: Counts,
        refusal: str | None,
    ) -> None:
        """Writes ids and weights of a multi-valued column into the records."""
        column, slots = self.columns.multi[number], self.slots[number]
        weights = self.config.weights_of_multi.get(column)
        separator = self.config.separator
        parts = [read_lists(block, column, weights, separator) for block in blocks]
        lengths = np.concatenate([part.lengths for part in parts])
        values = pa.chunked_array([part.values for part in parts])
        where = _Where(blocks, column, lengths)
        field = len(self.columns.categorical) + number
        ids = self._ids(values, field, where, counts, refusal)
        counts.add(column, "missing", sum(part.missing for part in parts))
        counts.add(column, "cut lists", int(np.count_nonzero(lengths > slots)))
        records[f"bag_{number}"] = padded(ids, lengths, slots, PADDING)
        if weights is not None:
            flat = [part.weights for part in parts if part.weights is not None]
            padded_weights = padded(np.concatenate(flat), lengths, slots, 0)
            records[f"bag_weights_{number}"] = padded_weights

    def _ids(
        self,
        values: pa.ChunkedArray,
        field: int,
        where: "_Where",
        counts: Counts,
        refusal: str | None,
    ) -> np.ndarray:
        """Returns the ids of the values of all blocks.

        All blocks in one call, as each call may build a large lookup table.
        """
        column = where.column
        try:
            ids = self.encoders[field].encode(values)
        except NoInteger as error:
            raise ValueError(
                f"{where.of(error.at)} column {column!r} holds "
                f"{values[error.at].as_py()[:40]!r}, no 64-bit integer: correct it, or "
                "leave the column out of --data.hashed."
            ) from None
        no_id = ids == 0
        unknown = no_id.copy()
        unknown[no_id] = ~np.asarray(is_missing(values.filter(pa.array(no_id))))
        counts.add(column, "missing", int(np.count_nonzero(no_id & ~unknown)))
        texts = values.filter(pa.array(unknown))
        counts.add_ids(column, ids, texts)
        is_float = np.asarray(pc.match_substring_regex(texts, LARGE_FLOAT))
        if is_float.any():
            refusal = "a float, too large to hold an id: write integers."
            unknown[unknown] = is_float
        if unknown.any() and refusal:
            at = int(np.argmax(unknown))
            raise ValueError(
                f"{where.of(at)} column {column!r} holds "
                f"{values[at].as_py()[:40]!r}, {refusal}"
            )
        return ids


class _Where(NamedTuple):
    """Where the values of a column come from.

    Attributes:
        blocks: the raw rows.
        column: the column.
        lengths: the number of values in each row; None if each has one.
    """

    blocks: list[Block]
    column: str
    lengths: np.ndarray | None = None

    def of(self, at: int) -> str:
        """Returns the file and the row of a value."""
        if self.lengths is not None:
            at = int(np.searchsorted(np.cumsum(self.lengths), at, side="right"))
        for block in self.blocks:
            if at < len(block.rows):
                return f"{block.file} row {block.rows[at]}"
            at -= len(block.rows)
        raise IndexError(at)


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
) -> Lists:
    """Returns the lists of a multi-valued column.

    Args:
        block: raw rows.
        column: the column of values.
        weights: the column of their weights; None if all are 1.
        separator: what stands between values if the column holds text.

    Raises:
        ValueError: with file, row and column, if text has no separator, a value has no
            text form, or the weights are not as many as the values, or no weights.
    """
    raw, lengths = _flat(block, column, separator)
    values = text_of(raw, block, column)
    present = ~np.asarray(is_missing(values))
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
                f"{block.file} column {column!r} holds {clip(array.type)}, no lists: "
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
        array = without_missing(array)
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
