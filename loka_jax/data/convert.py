"""Converts text or Parquet files to shards in two passes.

The first pass reads the training rows and learns the vocabularies and, if requested,
means and standard deviations; the second encodes every split. Nothing is learned from
validation or test rows.
"""

import itertools
import pathlib
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np

from loka_jax.data.batch import Schema
from loka_jax.data.blocks import BadRows, Block
from loka_jax.data.config import DataConfig, columns_of, features_of, settings_of
from loka_jax.data.encoding import VocabularyEncoder
from loka_jax.data.files import (
    Sources,
    check_unchanged,
    left_out,
    listed,
    stamp_of,
    unchanged,
)
from loka_jax.data.learn import Learner
from loka_jax.data.records import Encoding
from loka_jax.data.rows import Rows, names_of
from loka_jax.data.shards import (
    SPLITS,
    ShardWriter,
    check_disk,
    new_folder,
    record_dtype_of,
)
from loka_jax.data.values import Counts, Range, is_positive, nothing_left
from loka_jax.terminal import shown

PENDING_BYTES = 1 << 28  # of raw rows that are encoded together


def convert(
    config: DataConfig,
    sources: Sources,
    target: pathlib.Path,
    progress: Callable[[str, int], None] | None = None,
    *,
    base: Encoding | None = None,
) -> None:
    """Converts `sources` to a folder of shards; a failure leaves no folder behind.

    Args:
        config: columns and policies.
        sources: the files of each split.
        target: the new folder, which must not exist yet.
        progress: called with the stage's name and the number of rows read so far.
        base: the encoding to use instead of learning one; new values get its reserved
            rows.

    Raises:
        ValueError: one sentence with file, row or option, and the remedy.
    """
    progress = progress or (lambda stage, rows: None)
    conversion = _Conversion(config, sources, progress, base)
    with new_folder(target) as folder, unchanged(conversion.stamps):
        conversion.run(folder)


class _Conversion:
    """A conversion in progress: its columns, counts and encoding."""

    def __init__(self, config: DataConfig, sources: Sources, progress, base):
        self.config, self.sources = config, sources
        self.base: Encoding | None = base
        self.stamps = {path: stamp_of(path) for paths in sources for path in paths}
        self.columns = columns_of(config)
        # Check the columns before anything is read.
        Schema(
            **self.columns._asdict(),
            vocab_sizes=(1,) * len(self.columns.fields),
            slots=(1,) * len(self.columns.multi),
        )
        columns = (*self.columns.labels, *features_of(config))
        self.rows = Rows(config, sources, columns, progress)
        self.rows_learned = 0
        self.counts = {split: Counts() for split in SPLITS}
        self.dense_range = Range(len(self.columns.dense))
        self.examples: dict[str, int] = dict.fromkeys(SPLITS, 0)
        tasks = len(self.columns.labels)
        self.positives = {split: np.zeros(tasks, np.int64) for split in SPLITS}
        self.labelled = {split: np.zeros(tasks, np.int64) for split in SPLITS}
        self.weights: dict[str, float] = dict.fromkeys(SPLITS, 0.0)

    def run(self, folder: pathlib.Path) -> None:
        self.rows.learn_split()
        self.encoding = self._learn()
        check_unchanged(self.stamps)
        itemsize = record_dtype_of(self.encoding.schema).itemsize
        needed = self.rows_learned * itemsize
        check_disk(folder, needed, f"{self.rows_learned:,} training rows")
        writer = ShardWriter(folder)
        bad_rows = BadRows(self.config.max_bad_rows)
        pending: defaultdict[str, list[Block]] = defaultdict(list)
        held: Counter[str] = Counter()  # bytes
        for split, block in self.rows.blocks(SPLITS, bad_rows, "encoding"):
            pending[split].append(block)
            held[split] += block.nbytes
            if held[split] >= PENDING_BYTES:
                self._write(writer, split, pending.pop(split))
                held[split] = 0
        for split, blocks in pending.items():
            self._write(writer, split, blocks)
        self._check_splits()
        for field, encoder in enumerate(self.encoding.encoders):
            is_shared = self.columns.fields[field] in self.config.owners
            if isinstance(encoder, VocabularyEncoder) and not is_shared:
                writer.add_vocabulary(field, encoder.values)
        writer.finish(
            self.encoding.schema,
            sources=[
                {"file": path.name, "bytes": s.size, "modified_ns": s.modified_ns}
                for path, s in self.stamps.items()
            ],
            kind=self.config.kind,
            settings=settings_of(self.config),
            forms=dict(self.encoding.forms),
            standardizer=self._standardizer(),
            report=self._report(bad_rows),
        )

    def _learn(self) -> Encoding:
        """Returns the encoding; reads one block if it depends on no training rows."""
        learner = Learner(self.config, self.base)
        bad_rows = BadRows(self.config.max_bad_rows)
        for _, block in self.rows.blocks(("train",), bad_rows, "reading"):
            self.rows_learned += block.table.num_rows
            learner.add(block)
            if not learner.needs_all_rows:
                break
        encoding = learner.encoding()
        self.facts = learner.facts(encoding)
        return encoding

    def _standardizer(self) -> dict[str, list[float]] | None:
        if self.config.transform != "standardize":
            return None
        parts = self.encoding.standardizer._asdict()
        return {name: list(map(float, part)) for name, part in parts.items()}

    def _write(self, writer: ShardWriter, split: str, blocks: list[Block]) -> None:
        records = self.encoding.records(
            blocks, self.counts[split], unknown_refusal=self._unknown_refusal(split)
        )
        if split == "train" and self.config.keep_negatives < 1:
            # Each stands for 1 / rate rows, so that sums over them are unbiased.
            negative = ~is_positive(records["label"])
            records["weight"][negative] /= self.config.keep_negatives
        if self.config.is_weighted:
            self.weights[split] += float(records["weight"].sum(dtype=np.float64))
        writer.add_rows(split, records)
        self.examples[split] += len(records)
        if split == "train":
            self.dense_range.add(records["dense"])
        labels = records["label"].reshape(len(records), -1)
        self.positives[split] += np.count_nonzero(labels == 1, axis=0)
        self.labelled[split] += np.count_nonzero(~np.isnan(labels), axis=0)

    def _unknown_refusal(self, split: str) -> str | None:
        """Returns why a split may not hold values without an id, or None."""
        learned = self.base is None and self.config.min_count == 1
        if split == "train" and learned:
            # The file's stamp tells it, too, but not on every network disk.
            return "which it did not when it was read first: start again."
        if split != "train" and self.config.bad == "strict":
            return (
                "which is not in the training rows: correct it or set --data.bad clean."
            )
        return None

    def _check_splits(self) -> None:
        for split in SPLITS:
            paths = getattr(self.sources, split)
            if paths and not self.examples[split]:
                raise ValueError(
                    f"{names_of(paths)} has no rows for the {split} split: name a file "
                    "that has some."
                )
            if (
                self.config.is_weighted
                and self.examples[split]
                and not (self.weights[split] > 0)
            ):
                raise ValueError(
                    f"All {split} rows have weight 0 in column {self.config.weight!r}: "
                    "correct it or --data.weight."
                )
            if self.examples[split]:
                self._check_labels(split)
        if not self.examples["valid"]:
            raise ValueError(
                f"No row of {names_of(self.sources.train)} fell into the validation "
                f"split: name a file with --data.valid, or raise --data.valid-fraction "
                f"{self.config.valid_fraction:g}."
            )

    def _check_labels(self, split: str) -> None:
        for name, count in zip(self.columns.labels, self.labelled[split], strict=True):
            if not count:
                raise ValueError(
                    f"Column {name!r} has no label in any {split} row: correct it or "
                    "--data.labels."
                )

    def _report(self, bad_rows: BadRows) -> dict:
        policies = ("bad", "transform", "encoding")
        splits = {split: self._split_report(split) for split in SPLITS}
        splits = {split: part for split, part in splits.items() if part["examples"]}
        for sample in bad_rows.samples:
            sample["file"] = pathlib.Path(sample["file"]).name
        return {
            "source": self.config.kind,
            "split_rule": self.rows.split_rule(),
            "notes": [
                *_notes(self.config),
                *self._notes_on_labels(),
                *_notes_on_lists(self.encoding),
                *self._warnings(),
            ],
            "examples": {split: part["examples"] for split, part in splits.items()},
            "policies": {name: getattr(self.config, name) for name in policies},
            "bad_rows": {"count": bad_rows.count, "samples": bad_rows.samples},
            "categorical": self.facts,
            "totals": _sum_totals(splits),
            "splits": splits,
        }

    def _split_report(self, split: str) -> dict:
        return {
            "files": [path.name for path in getattr(self.sources, split)],
            "examples": self.examples[split],
            **self._label_counts(split),
            **({"weight": self.weights[split]} if self.config.is_weighted else {}),
            **self.counts[split].report(),
        }

    def _label_counts(self, split: str) -> dict:
        """Returns the number of clicks; by task, with that of labels, if several."""
        names, positives = self.columns.labels, self.positives[split].tolist()
        if len(names) == 1:
            return {"positives": positives[0]}
        labelled = self.labelled[split].tolist()
        return {
            "positives": dict(zip(names, positives, strict=True)),
            "labelled": dict(zip(names, labelled, strict=True)),
        }

    def _notes_on_labels(self) -> list[str]:
        """Returns a sentence on each task that some training rows have no label of."""
        counted = zip(self.columns.labels, self.labelled["train"].tolist(), strict=True)
        return [
            f"{self.examples['train'] - count:,} training rows have no label "
            f"{shown(repr(name))} and count for the other tasks only."
            for name, count in counted
            if count < self.examples["train"]
        ]

    def _warnings(self) -> list[str]:
        """Returns a sentence on each column from which a model cannot learn."""
        rows, counts = self.examples["train"], self.counts["train"]
        found = []
        for place, column in enumerate(self.columns.dense):
            only = self.dense_range.only_value(place)
            if cause := nothing_left(counts.of(column), rows, only, self.config):
                found.append(
                    f"Warning: nothing is left of dense column {shown(repr(column))} "
                    f"in the {rows:,} training rows: {cause}; leave it out, or correct "
                    "it."
                )
        if names := left_out(self.config, self.sources):
            found.append(
                "Warning: not read, as they are folders or their names say no split: "
                f"{shown(listed(names), 200)}."
            )
        by_split = (self.counts[s].warnings(f"the {s} rows") for s in SPLITS)
        return [*found, *itertools.chain.from_iterable(by_split)]


def _notes(config: DataConfig) -> list[str]:
    """Returns sentences on what was done to whole rows, for output and report."""
    notes = []
    if config.weight is not None:
        notes.append(
            f"Loss and metrics are weighted by column {shown(repr(config.weight))}."
        )
    if (rate := config.keep_negatives) < 1:
        notes.append(
            f"Of the training rows without a click the fraction {rate:.6g} is kept, by "
            f"hashed row number, with {1 / rate:.6g} times the weight, so that "
            "predictions stay calibrated."
        )
    return notes


def _notes_on_lists(encoding: Encoding) -> list[str]:
    """Returns a sentence on the room for each multi-valued column."""
    limit = encoding.config.max_values
    return [
        f"Column {shown(repr(column))}: the first {slots} values of a list are used, "
        + ("the limit." if slots == limit else "the most in a training row.")
        for column, slots in zip(encoding.columns.multi, encoding.slots, strict=True)
    ]


def _sum_totals(splits: dict) -> dict:
    kinds = ["missing", "nan", "inf", "huge", "negative", "oov"]
    totals = [split["totals"] for split in splits.values()]
    kinds += ["cut lists"] if any("cut lists" in total for total in totals) else []
    return {kind: sum(total.get(kind, 0) for total in totals) for kind in kinds}
