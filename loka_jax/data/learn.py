"""Learns an encoding from training rows, block by block."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)

import pyarrow as pa
import pyarrow.compute as pc

from loka_jax.data.blocks import Block
from loka_jax.data.config import MAX_ROWS, DataConfig
from loka_jax.data.encoding import (
    Encoder,
    HashEncoder,
    ValueCounter,
    VocabularyEncoder,
    as_text,
)
from loka_jax.data.records import Encoding
from loka_jax.data.room import memory_bytes
from loka_jax.data.settings import columns_of
from loka_jax.data.values import Counts, Moments, clean_dense

MERGE_BYTES = 1 << 28  # of counts in all fields that are merged together


class Learner:
    """Counts values and accumulates moments, and makes an encoding of them."""

    def __init__(self, config: DataConfig, base: Encoding | None = None):
        """Starts with no rows.

        Args:
            config: the columns, their encoding and their transform.
            base: the encoding to extend; None to learn one.
        """
        self._config, self._base = config, base
        self.columns = columns_of(config)
        names = self.columns.categorical
        self._counters = [
            ValueCounter(MERGE_BYTES // max(len(names), 1)) for _ in names
        ]
        self._moments = Moments(len(self.columns.dense))

    @property
    def needs_all_rows(self) -> bool:
        """Whether the encoding depends on the training rows."""
        if self._base is not None:
            return any(_has_room(encoder) for encoder in self._base.encoders)
        return self._config.encoding != "hash" or self._standardizes

    @property
    def _standardizes(self) -> bool:
        return self._config.transform == "standardize"

    def add(self, block: Block) -> None:
        """Adds the rows of a block.

        Raises:
            ValueError: for a value that is refused, or if the different values take
                half of the memory.
        """
        if self._standardizes:
            dense = clean_dense(block, self._config, self.columns.dense, Counts())
            self._moments.add(dense)
        if self._config.encoding != "hash":
            pairs = zip(self.columns.categorical, self._counters, strict=True)
            for column, counter in pairs:
                counter.add(as_text(block, column))
            self._check_memory()

    def encoding(self) -> Encoding:
        """Returns the encoding that the rows so far give.

        Raises:
            ValueError: if a column has more values than there are ids.
        """
        fields = range(len(self._counters))
        return Encoding(
            config=self._config,
            encoders=tuple(self._encoder(field) for field in fields),
            standardizer=(
                self._base.standardizer if self._base else self._moments.result()
            ),
        )

    def _encoder(self, field: int) -> Encoder:
        config, column = self._config, self.columns.categorical[field]
        if self._base is not None:
            return self._extended(self._base.encoders[field], field)
        if config.encoding == "hash":
            return HashEncoder(column, config.hash_buckets)
        values = self._counters[field].vocabulary(config.min_count)
        if len(values) + config.reserve_rows >= MAX_ROWS:
            raise ValueError(
                f"Column {column!r} has {len(values)} values, more than an int32 id "
                "can tell apart with --data.reserve-rows: use --data.encoding hash or "
                "a larger --data.min-count."
            )
        return VocabularyEncoder(values, config.reserve_rows)

    def _extended(self, known: Encoder, field: int) -> Encoder:
        """Returns the encoder with new values in its reserved rows."""
        if not isinstance(known, VocabularyEncoder) or not known.reserved:
            return known
        values = self._counters[field].vocabulary(self._config.min_count)
        is_new = pc.invert(pc.is_in(values, value_set=known.values))
        new = values.filter(is_new)[: known.reserved]
        extended = pa.concat_arrays([known.values, new.cast(known.values.type)])
        return VocabularyEncoder(extended, known.reserved - len(new))

    def _check_memory(self) -> None:
        sizes = [counter.merged_bytes for counter in self._counters]
        if (total := sum(sizes)) > (limit := memory_bytes() // 2):
            largest = self.columns.categorical[sizes.index(max(sizes))]
            raise ValueError(
                f"The different values of the categorical columns take {total:,} "
                f"bytes, most of them in {largest!r}, and {limit:,} are allowed, half "
                "of the memory: leave the column out, or use --data.encoding hash."
            )


def _has_room(encoder: Encoder) -> bool:
    return isinstance(encoder, VocabularyEncoder) and encoder.reserved > 0
