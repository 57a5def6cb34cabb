"""Turns raw rows into the records that models read, the same way at every time.

An `Encoding` is learned from training rows once. A conversion, a later day and a
prediction all go through `Encoding.records`, so equal rows give equal inputs.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from loka_jax.data.batch import Schema
from loka_jax.data.blocks import Block
from loka_jax.data.config import DataConfig
from loka_jax.data.encoding import Encoder, as_text
from loka_jax.data.settings import Columns, columns_of
from loka_jax.data.shards import record_dtype_of
from loka_jax.data.values import (
    Counts,
    Standardizer,
    clean_dense,
    parse_labels,
    parse_weights,
    transform_dense,
)


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How raw columns become inputs of a model.

    Attributes:
        config: the columns and the policies for their values.
        encoders: the encoder of each categorical column.
        standardizer: of the dense columns; used by `transform="standardize"` only.
    """

    config: DataConfig
    encoders: tuple[Encoder, ...]
    standardizer: Standardizer

    @property
    def columns(self) -> Columns:
        """The names of the columns."""
        return columns_of(self.config)

    @property
    def schema(self) -> Schema:
        """The columns and table sizes."""
        sizes = tuple(encoder.rows for encoder in self.encoders)
        weighted = self.config.is_weighted
        return Schema(**self.columns._asdict(), vocab_sizes=sizes, weighted=weighted)

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
                rows["label"] = parse_labels(block, columns.label)
                if self.config.weight is not None:
                    rows["weight"] = parse_weights(block, self.config.weight)
            dense = clean_dense(block, self.config, columns.dense, counts)
            rows["dense"] = transform_dense(dense, self.config, self.standardizer)
            start += size
        for field in range(len(self.encoders)):
            # All blocks in one call, as each call may build a large lookup table.
            records["ids"][:, field] = self._ids(blocks, field, counts, unknown_refusal)
        return records

    def _ids(
        self, blocks: list[Block], field: int, counts: Counts, refusal: str | None
    ) -> np.ndarray:
        column = self.columns.categorical[field]
        values = pa.chunked_array([as_text(block, column) for block in blocks])
        ids = self.encoders[field].encode(values)
        missing = np.asarray(values.is_null())
        unknown = (ids == 0) & ~missing
        counts.add(column, "missing", int(np.count_nonzero(missing)))
        counts.add(column, "oov", int(np.count_nonzero(unknown)))
        if unknown.any() and refusal:
            at = int(np.argmax(unknown))
            rows = np.concatenate([block.rows for block in blocks])
            file = np.repeat([b.file for b in blocks], [len(b.rows) for b in blocks])
            raise ValueError(
                f"{file[at]} row {rows[at]} column {column!r} holds "
                f"{values[at].as_py()[:40]!r}, {refusal}"
            )
        return ids
