"""Learns an encoding from training rows, block by block."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow creates the functions of its compute module at import)

import functools
import os
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from loka_jax.data.blocks import Block
from loka_jax.data.config import MAX_ROWS, DataConfig, columns_of
from loka_jax.data.encoding import (
    Encoder,
    ValueCounter,
    VocabularyEncoder,
    as_text,
    frequent,
    hash_encoder,
    is_missing,
    text_form,
)
from loka_jax.data.records import Encoding, read_lists
from loka_jax.data.values import Counts, Moments, clean_dense
from loka_jax.terminal import clip

# What a container may use, in the two versions of Linux's control groups.
_CONTAINER_LIMITS = (
    pathlib.Path("/sys/fs/cgroup/memory.max"),
    pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
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
        names = self.columns.fields
        # Columns that share a table share a counter.
        counters = {name: ValueCounter(MERGE_BYTES // len(names)) for name in names}
        self._owners = {name: config.owners.get(name, name) for name in names}
        self._counters = [counters[owner] for owner in self._owners.values()]
        self._hashes = [hash_encoder(config, o) for o in self._owners.values()]
        self._num_counted = [0] * len(names)
        self._moments = Moments(len(self.columns.dense))
        self._longest = [1] * len(self.columns.multi)
        self._forms: dict[str, str] = {}

    @property
    def needs_all_rows(self) -> bool:
        """Whether the encoding depends on the training rows."""
        has_lists = self._base is None and bool(self.columns.multi)
        return self._counts_all or self._standardizes or has_lists

    @property
    def _counts_all(self) -> bool:
        """Whether all values are counted; else those of the first block are."""
        if self._base is not None:
            return any(_has_room(encoder) for encoder in self._base.encoders)
        return None in self._hashes

    @property
    def _standardizes(self) -> bool:
        return self._base is None and self._config.transform == "standardize"

    def add(self, block: Block) -> None:
        """Adds the rows of a block.

        Raises:
            ValueError: for a value that is refused, or if the different values take
                half of the memory.
        """
        if self._standardizes:
            dense = clean_dense(block, self._config, self.columns.dense, Counts())
            self._moments.add(dense)
        separator = self._config.separator
        lists = [
            read_lists(block, name, None, separator) for name in self.columns.multi
        ]
        lengths = (int(part.lengths.max(initial=0)) for part in lists)
        self._longest = [*map(max, self._longest, lengths)]
        for field, column in enumerate(self.columns.fields):
            if (form := text_form(block.table.schema.field(column).type)) is not None:
                self._forms.setdefault(self._owners[column], form)
            if not self._is_counted(field):
                continue
            single = len(self.columns.categorical)
            is_list = field >= single
            values = lists[field - single].values if is_list else as_text(block, column)
            self._counters[field].add(values)
            self._num_counted[field] += block.table.num_rows
        if self._counts_all:
            self._check_memory()

    def _is_counted(self, field: int) -> bool:
        """Returns whether values are counted: of a hashed field in the first block."""
        is_learned = self._hashes[field] is None and self._counts_all
        return is_learned or not self._num_counted[field]

    @functools.cached_property
    def _ranked(self) -> list[pa.Table]:
        """The counted values of each column; read once all rows are added."""
        ranked = (counter.ranked() for counter in self._counters)
        return [table.filter(pc.invert(is_missing(table["value"]))) for table in ranked]

    def facts(self, encoding: Encoding) -> dict[str, dict]:
        """Returns the facts on each field, see `column_facts`."""
        facts, names = {}, self.columns.fields
        for field, (name, encoder) in enumerate(
            zip(names, encoding.encoders, strict=True)
        ):
            ranked = self._ranked[field]
            facts[name] = column_facts(name, encoder, ranked, self._num_counted[field])
            if (owner := self._owners[name]) != name:
                facts[name]["table_of"] = owner
            if self._base is not None and self._counts_all:
                facts[name] |= _growth(self._base.encoders[field], encoder, ranked)
        return facts

    def encoding(self) -> Encoding:
        """Returns the encoding that the rows so far give.

        Raises:
            ValueError: if a column has more values than there are ids.
        """
        encoders = {
            column: self._encoder(field)
            for field, column in enumerate(self.columns.fields)
            if self._owners[column] == column
        }
        return Encoding(
            config=self._config,
            encoders=tuple(encoders[owner] for owner in self._owners.values()),
            standardizer=(
                self._base.standardizer if self._base else self._moments.result()
            ),
            slots=self._base.slots if self._base else self._slots(),
            forms=self._base.forms if self._base else self._forms,
        )

    def _encoder(self, field: int) -> Encoder:
        config, column = self._config, self.columns.fields[field]
        if self._base is not None:
            return self._extended(self._base.encoders[field], field)
        if (hashes := self._hashes[field]) is not None:
            return hashes
        values = frequent(self._ranked[field], config.min_count)
        if len(values) + config.reserve_rows >= MAX_ROWS:
            raise ValueError(
                f"Column {column!r} has {len(values)} values, more than an int32 id "
                "can tell apart with --data.reserve-rows: use --data.encoding hash or "
                "a larger --data.min-count."
            )
        return VocabularyEncoder(values, config.reserve_rows)

    def _slots(self) -> tuple[int, ...]:
        """Returns how many values of each list are used: all, or up to the limit."""
        return tuple(min(n, self._config.max_values) for n in self._longest)

    def _extended(self, known: Encoder, field: int) -> Encoder:
        """Returns the encoder with new values in its reserved rows."""
        if not isinstance(known, VocabularyEncoder) or not known.reserved:
            return known
        values = frequent(self._ranked[field], self._config.min_count)
        new = _unknown(values, known)[: known.reserved]
        extended = pa.concat_arrays([known.values, new.cast(known.values.type)])
        return VocabularyEncoder(extended, known.reserved - len(new))

    def _check_memory(self) -> None:
        sizes = [
            counter.merged_bytes if self._owners[column] == column else 0
            for column, counter in zip(self.columns.fields, self._counters, strict=True)
        ]
        if (total := sum(sizes)) > (limit := memory_bytes() // 2):
            largest = self.columns.fields[sizes.index(max(sizes))]
            raise ValueError(
                f"The different values of the categorical columns take {total:,} "
                f"bytes, most of them in {largest!r}, and {limit:,} are allowed, half "
                "of the memory: leave the column out, or use --data.encoding hash."
            )


def _has_room(encoder: Encoder) -> bool:
    return isinstance(encoder, VocabularyEncoder) and encoder.reserved > 0


def _unknown(values: pa.Array, known: VocabularyEncoder) -> pa.Array:
    return values.filter(pa.array(known.encode(values) == 0))


def _growth(before: Encoder, after: Encoder, ranked: pa.Table) -> dict[str, int]:
    """Returns the number of new values, and of those with a row of their own."""
    if not isinstance(before, VocabularyEncoder) or not isinstance(
        after, VocabularyEncoder
    ):
        return {}
    new = _unknown(ranked["value"].combine_chunks(), before)
    return {
        "new_values": len(new),
        "new_rows": len(after.values) - len(before.values),
    }


NUM_SHOWN = 5  # of the most frequent values
_NUM_SPLIT = 10_000  # of the most frequent values, searched for separators
_SEPARATORS = "|,; "
_MIN_ROWS = 50  # fewer say nothing about a column


def column_facts(
    column: str, encoder: Encoder, ranked: pa.Table, num_rows: int
) -> dict[str, Any]:
    """Returns the facts on a column, as JSON values.

    Args:
        column: its name.
        encoder: its encoder.
        ranked: the columns `value` and `count` of the rows that were counted, the most
            frequent values first.
        num_rows: the number of these rows.

    Returns:
        `rows` of its table; `values`, the size of its vocabulary, and `reserved` rows,
        both None for hashes; `counted_rows`; `most_frequent` values with their counts;
        `warning`, a sentence or None.
    """
    known = isinstance(encoder, VocabularyEncoder)
    top = ranked.slice(0, NUM_SHOWN).to_pylist()
    return {
        "rows": encoder.rows,
        "values": len(encoder.values) if known else None,
        "reserved": encoder.reserved if known else None,
        "counted_rows": num_rows,
        "most_frequent": [[clip(row["value"], 40), row["count"]] for row in top],
        "warning": _warning(column, ranked, num_rows),
    }


def _warning(column: str, ranked: pa.Table, num_rows: int) -> str | None:
    if num_rows < _MIN_ROWS:
        return None
    if (guess := _separator(ranked)) is not None:
        separator, share, parts, values = guess
        return (
            f"{clip(column)} looks multi-valued: {share:.0%} of its rows hold "
            f"{separator!r}, and {values:,} values are made of {parts:,} parts, but "
            "each is trained as one value: name the column with --data.multi, and "
            "--data.separator."
        )
    counted = pc.sum(ranked["count"]).as_py() or 0  # of lists, more than rows
    if len(ranked) >= 0.8 * max(num_rows, counted):
        return (
            f"{clip(column)} has {len(ranked):,} values in {num_rows:,} rows: nothing "
            "is learned from a value that is seen once; leave the column out, or raise "
            "--data.min-count."
        )
    return None


def _separator(ranked: pa.Table) -> tuple[str, float, int, int] | None:
    """Returns a separator in most rows, their share, and the numbers of parts, values.

    None if there is none, or if the parts are not far fewer than the values.
    """
    values = ranked["value"].slice(0, _NUM_SPLIT)
    counts = np.asarray(ranked["count"].slice(0, _NUM_SPLIT))
    for separator in _SEPARATORS:
        holds = np.asarray(pc.match_substring(values, separator))
        share = counts[holds].sum() / max(counts.sum(), 1)
        if share < 0.5:
            continue
        texts = values.filter(pa.array(holds)).combine_chunks()
        parts = pc.list_flatten(pc.split_pattern(texts, separator))
        num_parts = len(pc.unique(pc.utf8_trim_whitespace(parts)))
        if 2 * num_parts <= len(values):
            return separator, float(share), num_parts, len(values)
    return None


def memory_bytes() -> int:
    """Returns the memory of the machine, or of the container if that has less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CONTAINER_LIMITS:
        try:
            memory = min(memory, int(path.read_text()))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return memory
