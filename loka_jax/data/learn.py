"""Learns an encoding from training rows, block by block."""

import os
import pathlib
from typing import Any

import numpy as np
import pyarrow as pa

from loka_jax.data.blocks import Block, pc
from loka_jax.data.config import MAX_ROWS, DataConfig, columns_of
from loka_jax.data.encoding import (
    Encoder,
    ValueCounter,
    VocabularyEncoder,
    frequent,
    hash_encoder,
    is_missing,
    read_texts,
    text_form,
)
from loka_jax.data.records import Encoding
from loka_jax.data.values import Counts, Sample, clean_dense
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
        """Starts with no rows; extends the encoding `base` if there is one."""
        self._config, self._base = config, base
        self.columns = columns_of(config)
        names = [n for n in self.columns.fields if n not in config.inputs.parts]
        self._owners = {name: config.owners.get(name, name) for name in names}
        # Columns that share a table share a counter.
        merge_bytes = MERGE_BYTES // max(len(names), 1)
        counters = {o: ValueCounter(merge_bytes) for o in self._owners.values()}
        self._counters = counters
        self._hashes = {owner: hash_encoder(config, owner) for owner in counters}
        self._num_counted = dict.fromkeys(names, 0)
        self._learned = {} if base else config.inputs.learned
        self._sample = Sample(len(config.inputs.numbers))
        self._longest = dict.fromkeys(self.columns.multi, 1)
        self._forms: dict[str, str] = {}

    @property
    def needs_all_rows(self) -> bool:
        """Whether the encoding depends on the training rows."""
        has_lists = self._base is None and bool(self.columns.multi)
        return self._counts_all or bool(self._learned) or has_lists

    @property
    def _counts_all(self) -> bool:
        """Whether all values are counted; else those of the first block are."""
        if self._base is not None:
            return any(_reserved(encoder) for encoder in self._base.encoders)
        return None in self._hashes.values()

    def add(self, block: Block) -> None:
        """Adds the rows of a block."""
        config = self._config
        if self._learned:
            numbers = clean_dense(block, config, Counts())
            self._sample.add(np.stack([*numbers.values()], axis=1))
        for column, owner in self._owners.items():
            if (form := text_form(block.table.schema.field(column).type)) is not None:
                self._forms.setdefault(owner, form)
            # Values of a hashed field are counted in the first block.
            is_learned = self._hashes[owner] is None and self._counts_all
            is_counted = is_learned or not self._num_counted[column]
            if not is_counted and column not in self._longest:
                continue
            texts = read_texts(block, column, config, with_weights=False)
            if texts.lengths is not None:
                longest = int(texts.lengths.max(initial=0))
                self._longest[column] = max(self._longest[column], longest)
            if is_counted:
                self._counters[owner].add(texts.values)
                self._num_counted[column] += len(block.rows)
        if self._counts_all:
            self._check_memory()

    def result(self) -> tuple[Encoding, dict[str, dict]]:
        """Returns the encoding that the rows so far give, and `column_facts`."""
        config, base = self._config, self._base
        before = {}
        if base is not None:
            before = dict(zip(self.columns.fields, base.encoders, strict=True))
        facts, encoders, ranked = {}, {}, {}
        for column, owner in self._owners.items():
            if owner not in ranked:
                table = self._counters[owner].ranked()
                ranked[owner] = table.filter(pc.invert(is_missing(table["value"])))
                encoders[owner] = self._encoder(owner, before.get(owner), ranked[owner])
            counts, rows = ranked[owner], self._num_counted[column]
            facts[column] = column_facts(column, encoders[owner], counts, rows)
            if owner != column:
                facts[column]["table_of"] = owner
            if base is not None and self._counts_all:
                facts[column] |= _growth(before[column], encoders[owner], counts)
        place = config.inputs.numbers.index
        learned = {
            name: self._sample.constants(place(source), steps)
            for name, (source, steps) in self._learned.items()
        }
        constants = base.constants if base else learned
        parts = dict(config.inputs.bound(constants).parts)
        for name, part in parts.items():
            facts[name] = {"rows": part.rows, "values": len(part.values)}
            facts[name] |= {"reserved": 0, "most_frequent": [], "warning": None}
        own = {name: encoders[owner] for name, owner in self._owners.items()} | parts
        longest = self._longest.values()
        slots = tuple(min(n, config.max_values) for n in longest)
        encoding = Encoding(
            config=config,
            encoders=tuple(own[name] for name in self.columns.fields),
            constants=constants,
            slots=base.slots if base else slots,
            forms=base.forms if base else self._forms,
        )
        return encoding, facts

    def _encoder(self, owner: str, known: Encoder | None, ranked: pa.Table) -> Encoder:
        """Returns the encoder of a table; a known one with new values in its rows."""
        config = self._config
        if known is not None and not _reserved(known):
            return known
        if (hashes := self._hashes[owner]) is not None:
            return hashes
        values = frequent(ranked, config.min_count)
        if isinstance(known, VocabularyEncoder):
            new = _unknown(values, known)[: known.reserved]
            extended = pa.concat_arrays([known.values, new.cast(known.values.type)])
            return VocabularyEncoder(extended, known.reserved - len(new))
        if len(values) + config.reserve_rows >= MAX_ROWS:
            raise ValueError(
                f"Column {owner!r} has {len(values)} values, more than an int32 id "
                "can tell apart with --data.reserve-rows: use --data.encoding hash or "
                "a larger --data.min-count."
            )
        return VocabularyEncoder(values, config.reserve_rows)

    def _check_memory(self) -> None:
        sizes = {owner: x.merged_bytes for owner, x in self._counters.items()}
        if (total := sum(sizes.values())) > (limit := memory_bytes() // 2):
            largest = max(sizes, key=lambda owner: sizes[owner])
            raise ValueError(
                f"The different values of the categorical columns take {total:,} "
                f"bytes, most of them in {largest!r}, and {limit:,} are allowed, half "
                "of the memory: leave the column out, or use --data.encoding hash."
            )


def _reserved(encoder: Encoder) -> int:
    return encoder.reserved if isinstance(encoder, VocabularyEncoder) else 0


def _unknown(values: pa.Array, known: VocabularyEncoder) -> pa.Array:
    return values.filter(pa.array(known.encode(values) == 0))


def _growth(before: Encoder, after: Encoder, ranked: pa.Table) -> dict[str, int]:
    """Returns the number of new values, and of those with a row of their own."""
    if not isinstance(before, VocabularyEncoder):
        return {}
    new = _unknown(ranked["value"].combine_chunks(), before)
    return {"new_values": len(new), "new_rows": _reserved(before) - _reserved(after)}


NUM_SHOWN = 5  # of the most frequent values
_NUM_SPLIT = 10_000  # of the most frequent values, searched for separators
_SEPARATORS = "|,; "
_MIN_ROWS = 50  # fewer say nothing about a column


def column_facts(
    column: str, encoder: Encoder, ranked: pa.Table, num_rows: int
) -> dict[str, Any]:
    """Returns the facts on a column, as JSON values.

    Args:
        ranked: the columns `value` and `count` of the rows that were counted, the most
            frequent values first.

    Returns:
        `rows` of its table; `values`, the size of its vocabulary, and `reserved` rows,
        both None for hashes; `most_frequent` values with their counts; `warning`, a
        sentence or None.
    """
    known = isinstance(encoder, VocabularyEncoder)
    top = ranked.slice(0, NUM_SHOWN).to_pylist()
    return {
        "rows": encoder.rows,
        "values": len(encoder.values) if known else None,
        "reserved": encoder.reserved if known else None,
        "most_frequent": [[clip(row["value"], 40), row["count"]] for row in top],
        "warning": _warning(column, ranked, num_rows),
    }


def _warning(column: str, ranked: pa.Table, num_rows: int) -> str | None:
    """Returns a sentence on values that are lists as text, or seen once; or None."""
    if num_rows < _MIN_ROWS:
        return None
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
            return (
                f"{clip(column)} looks multi-valued: {share:.0%} of its rows hold "
                f"{separator!r}, and {len(values):,} values are made of {num_parts:,} "
                "parts, but each is trained as one value: name the column with "
                "--data.multi, and --data.separator."
            )
    counted = pc.sum(ranked["count"]).as_py() or 0  # of lists, more than rows
    if len(ranked) >= 0.8 * max(num_rows, counted):
        return (
            f"{clip(column)} has {len(ranked):,} values in {num_rows:,} rows: nothing "
            "is learned from a value that is seen once; leave the column out, or raise "
            "--data.min-count."
        )
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
