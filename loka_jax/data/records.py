"""Turns raw rows into the records that models read, the same way at every time.

An `Encoding` is learned from training rows once. A conversion, a later day and a
prediction all go through `Encoding.records`, so equal rows give equal inputs.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from loka_jax.data import transforms
from loka_jax.data.batch import Columns, Schema
from loka_jax.data.blocks import Block, pc
from loka_jax.data.config import DataConfig, columns_of
from loka_jax.data.encoding import (
    LARGE_FLOAT,
    NO_INTEGER,
    Encoder,
    Texts,
    is_missing,
    read_texts,
    text_form,
    user_keys,
)
from loka_jax.data.event_options import HISTORY
from loka_jax.data.reader import record_dtype_of
from loka_jax.data.transform_options import Constants, Input
from loka_jax.data.unfold import unfolded
from loka_jax.data.values import (
    Counts,
    clean_dense,
    parse_instants,
    parse_labels,
    parse_times,
    parse_weights,
)
from loka_jax.terminal import clip

PADDING = -1  # in place of an id


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How raw columns become inputs of a model.

    Attributes:
        constants: what training rows say of the inputs that transforms make.
        slots: the most values in a list of each multi-valued column.
        forms: how the training values of each table were written as text, see
            `text_form`.
    """

    config: DataConfig
    encoders: tuple[Encoder, ...]
    constants: Constants = dataclasses.field(default_factory=dict)
    slots: tuple[int, ...] = ()
    forms: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> Columns:
        """The names of the columns."""
        return columns_of(self.config)

    @property
    def schema(self) -> Schema:
        """The columns and table sizes."""
        owners = self.config.owners
        owner_of = (owners.get(name, name) for name in self.columns.fields)
        return Schema(
            **vars(self.columns),
            vocab_sizes=tuple(encoder.rows for encoder in self.encoders),
            owners=tuple(owner_of) if owners else (),
            slots=self.slots,
            weighted_multi=tuple(self.config.weights_of_multi),
            weighted=self.config.is_weighted,
        )

    def records(
        self,
        blocks: list[Block],
        counts: Counts,
        *,
        labels: Literal["all", "some", "none"] = "all",
        unknown_refusal: str | None = None,
    ) -> np.ndarray:
        """Returns the rows of all blocks as records of `record_dtype`, in their order.

        Args:
            counts: counts the values that policies apply to, and the unknown ones.
            labels: which rows have a label. Where only "some" do, labels are NaN of the
                others; where "none" do, the blocks lack the column, and labels are 0.
                Weights are 1 unless "all" rows have labels.
            unknown_refusal: what is wrong with a value that has no id, as the end of a
                sentence; None if it gets id 0.

        Raises:
            ValueError: with file, row and column of a value that is refused.
        """
        columns, config = self.columns, self.config
        if config.lists:
            for block in blocks if labels == "all" else ():
                parse_labels(block, columns.labels)  # those of examples
            blocks = [unfolded(block, config) for block in blocks]
        records = np.zeros(
            sum(len(b.rows) for b in blocks), record_dtype_of(self.schema)
        )
        if config.is_weighted:
            records["weight"] = 1
        start = 0
        for block in blocks:
            rows = records[start : start + len(block.rows)]
            if labels != "none":
                may_lack = labels == "some" or bool(config.lists)
                rows["label"] = parse_labels(block, columns.labels, may_lack=may_lack)
            if labels == "all" and config.weight is not None:
                rows["weight"] = parse_weights(block, config.weight)
            if columns.user is not None and config.time is not None:
                rows["user"] = (
                    np.asarray(block.column(HISTORY))
                    if config.lists
                    else user_keys(block, columns.user)
                )
                times, is_date = parse_times(block, config.time)
                rows["time"] = times * (1e-6 if is_date else 1.0)
            self._fill_numbers(rows, block, counts)
            start += len(block.rows)
            self._check_forms(block)
        for field, column in enumerate(columns.fields):
            if isinstance(self.encoders[field], Input):
                continue
            # All blocks in one call, as each may build a large lookup table.
            parts = [read_texts(block, column, config) for block in blocks]
            lengths = _joined([part.lengths for part in parts])
            ids = self._ids(parts, field, blocks, lengths, counts, unknown_refusal)
            if lengths is None:
                records["ids"][:, field] = ids
                continue
            number = field - len(columns.categorical)
            slots = self.slots[number]
            counts.add(column, "missing", sum(part.missing for part in parts))
            counts.add(column, "cut lists", int(np.count_nonzero(lengths > slots)))
            records[f"bag_{number}"] = _padded(ids, lengths, slots, PADDING)
            weights = _joined([part.weights for part in parts])
            if weights is not None:
                padded = _padded(weights, lengths, slots, 0)
                records[f"bag_weights_{number}"] = padded
        return records

    def _fill_numbers(self, rows: np.ndarray, block: Block, counts: Counts) -> None:
        """Writes what is made of numbers and times."""
        values = clean_dense(block, self.config, counts)
        inputs, fields = self.config.inputs.bound(self.constants), self.columns.fields
        for place, (source, steps) in enumerate(inputs.dense.values()):
            rows["dense"][:, place] = transforms.dense(values[source], steps)
        for name, (source, (step,)) in inputs.parts.items():
            if is_time := source not in values:
                values[source] = parse_instants(block, source)
            ids = rows["ids"][:, fields.index(name)] = transforms.ids(
                values[source], step
            )
            if is_time:
                counts.add(source, "missing", int(np.count_nonzero(ids == 0)))

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

    def _ids(
        self,
        parts: list[Texts],
        field: int,
        blocks: list[Block],
        lengths: np.ndarray | None,
        counts: Counts,
        refusal: str | None,
    ) -> np.ndarray:
        """Returns the ids of the values of all blocks."""
        column = self.columns.fields[field]
        values = pa.concat_arrays([part.values for part in parts])

        def refuse(wrong: np.ndarray, why: str | None) -> None:
            if why and wrong.any():
                at = int(np.argmax(wrong))
                raise ValueError(
                    f"{_place(blocks, lengths, at)} column {column!r} holds "
                    f"{values[at].as_py()[:40]!r}, {why}"
                )

        encoder = self.encoders[field]
        assert not isinstance(encoder, Input)
        ids = encoder.encode(values)
        why = "no 64-bit integer: correct it, or leave the column out of --data.hashed."
        refuse(ids == NO_INTEGER, why)
        no_id = ids == 0
        unknown = no_id.copy()
        unknown[no_id] = ~np.asarray(is_missing(values.filter(pa.array(no_id))))
        counts.add(column, "missing", int(np.count_nonzero(no_id & ~unknown)))
        texts = values.filter(pa.array(unknown))
        counts.add_ids(column, ids, texts)
        is_float = unknown.copy()
        is_float[unknown] = pc.match_substring_regex(texts, LARGE_FLOAT)
        refuse(is_float, "a float, too large to hold an id: write integers.")
        refuse(unknown, refusal)
        return ids


def _joined(parts: list[np.ndarray | None]) -> np.ndarray | None:
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if arrays else None


def _place(blocks: list[Block], lengths: np.ndarray | None, at: int) -> str:
    """Returns the file and the row of a value."""
    if lengths is not None:
        at = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
    for block in blocks:
        if at < len(block.rows):
            return f"{block.file} row {block.rows[at]}"
        at -= len(block.rows)
    raise IndexError(at)


def _padded(flat: np.ndarray, lengths: np.ndarray, slots: int, fill) -> np.ndarray:
    """Returns `[rows, slots]` with the first `slots` of each list, then `fill`."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    out = np.full((len(lengths), slots), fill, flat.dtype)
    fits = place < slots
    out[row[fits], place[fits]] = flat[fits]
    return out
