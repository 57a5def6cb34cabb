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
from loka_jax.data.config import DataConfig, columns_of, without_files
from loka_jax.data.encoding import VocabularyEncoder
from loka_jax.data.files import Sources, check_unchanged, left_out, unchanged
from loka_jax.data.learn import Learner
from loka_jax.data.places import address_of, listed, shown, stamp_of
from loka_jax.data.reader import record_dtype_of
from loka_jax.data.records import Encoding
from loka_jax.data.shards import SPLITS, ShardWriter, check_disk, new_folder
from loka_jax.data.split import SplitReader, names_of
from loka_jax.data.transform_options import Input
from loka_jax.data.unfold import unfolded
from loka_jax.data.values import MAX_DENSE, Counts, is_positive
from loka_jax.terminal import clip

PENDING_BYTES = 1 << 26  # of raw rows that are encoded together; more is no faster


def convert(
    config: DataConfig,
    sources: Sources,
    target: pathlib.Path,
    progress: Callable[[str, int], None] = lambda stage, rows: None,
    *,
    base: Encoding | None = None,
) -> None:
    """Converts `sources` to a folder of shards; a failure leaves no folder behind.

    Args:
        progress: called with the stage's name and the number of rows read so far.
        base: the encoding to use instead of learning one; new values get its reserved
            rows.

    Raises:
        ValueError: one sentence with file, row or option, and the remedy.
    """
    conversion = _Conversion(config, sources, progress, base)
    with new_folder(target) as folder, unchanged(conversion.stamps):
        conversion.run(folder)


class _Split:
    """What is counted of the rows of a split."""

    def __init__(self, columns):
        self.labels = columns.labels
        self.values = Counts()
        self.examples, self.weight = 0, 0.0
        self.positives = np.zeros(len(columns.labels), np.int64)
        self.labelled = np.zeros(len(columns.labels), np.int64)
        # The smallest and the largest input of each dense column.
        self.low = np.full(len(columns.dense), np.inf)
        self.high = np.full(len(columns.dense), -np.inf)

    def add(self, records: np.ndarray) -> None:
        self.examples += len(records)
        labels = records["label"].reshape(len(records), -1)
        self.positives += np.count_nonzero(labels == 1, axis=0)
        self.labelled += np.count_nonzero(~np.isnan(labels), axis=0)
        if "weight" in (records.dtype.names or ()):
            self.weight += float(records["weight"].sum(dtype=np.float64))
        dense = records["dense"]
        self.low = np.minimum(self.low, dense.min(axis=0, initial=np.inf))
        self.high = np.maximum(self.high, dense.max(axis=0, initial=-np.inf))

    def report(self) -> dict:
        """Returns the number of clicks; by task, with that of labels, if several."""
        positives, labelled = self.positives.tolist(), self.labelled.tolist()
        counts = {"positives": positives[0]}
        if len(self.labels) > 1:
            counts = {
                "positives": dict(zip(self.labels, positives, strict=True)),
                "labelled": dict(zip(self.labels, labelled, strict=True)),
            }
        return {"examples": self.examples, **counts}

    def nothing_left(self, place: int, column: str, transform: Input) -> str | None:
        """Returns why a dense column tells rows apart no more, or None if it does."""
        counts, low = self.values.of(transform.source), self.low[place]
        if self.examples < 2:
            return None
        if counts["missing"] + counts["nan"] == self.examples:
            return "all its values are missing"
        if counts["huge"] + counts["inf"] == self.examples:
            return f"all its values lie beyond {MAX_DENSE:g}"
        if low != self.high[place]:
            return None
        steps = ",".join(str(name) for name, *_ in transform.steps)
        return f"it is constant, {low:g} after --data.transform {steps}"


class _Conversion:
    """A conversion in progress: its columns, counts and encoding."""

    def __init__(self, config: DataConfig, sources: Sources, progress, base):
        self.config, self.sources = config, sources
        self.base: Encoding | None = base
        self.stamps = {path: stamp_of(path) for paths in sources for path in paths}
        self.columns = columns_of(config)
        # Check the columns before anything is read.
        Schema(
            **vars(self.columns),
            vocab_sizes=(1,) * len(self.columns.fields),
            slots=(1,) * len(self.columns.multi),
        )
        self.reader = SplitReader(config, sources, progress)
        self.rows_learned = 0
        self.splits = {split: _Split(self.columns) for split in SPLITS}

    def run(self, folder: pathlib.Path) -> None:
        self.reader.learn_rule()
        self.encoding, facts = self._learn()
        check_unchanged(self.stamps)
        itemsize = record_dtype_of(self.encoding.schema).itemsize
        needed = self.rows_learned * itemsize
        check_disk(folder, needed, f"{self.rows_learned:,} training rows")
        writer = ShardWriter(folder)
        bad_rows = BadRows(self.config.max_bad_rows)
        pending: defaultdict[str, list[Block]] = defaultdict(list)
        for split, block in self.reader.blocks(SPLITS, bad_rows, "encoding"):
            pending[split].append(block)
            if sum(waiting.nbytes for waiting in pending[split]) >= PENDING_BYTES:
                self._write(writer, split, pending.pop(split))
        for split, blocks in pending.items():
            self._write(writer, split, blocks)
        self._check_splits()
        for field, encoder in enumerate(self.encoding.encoders):
            is_shared = self.columns.fields[field] in self.config.owners
            if isinstance(encoder, VocabularyEncoder) and not is_shared:
                writer.add_vocabulary(field, encoder.values)
        writer.finish(
            self.encoding.schema,
            without_files(self.config),
            forms=dict(self.encoding.forms),
            constants=dict(self.encoding.constants),
            report=self._report(bad_rows, facts),
        )

    def _learn(self) -> tuple[Encoding, dict]:
        """Returns the encoding; reads one block if it depends on no training rows."""
        learner = Learner(self.config, self.base)
        bad_rows = BadRows(self.config.max_bad_rows)
        for _, block in self.reader.blocks(("train",), bad_rows, "reading"):
            if self.config.lists:
                block = unfolded(block, self.config)
            self.rows_learned += len(block.rows)
            learner.add(block)
            if not learner.needs_all_rows:
                break
        return learner.result()

    def _write(self, writer: ShardWriter, split: str, blocks: list[Block]) -> None:
        counts, refusal = self.splits[split].values, self._unknown_refusal(split)
        records = self.encoding.records(blocks, counts, unknown_refusal=refusal)
        if split == "train" and self.config.keep_negatives < 1:
            # Each stands for 1 / rate rows, so that sums over them are unbiased.
            negative = ~is_positive(records["label"])
            records["weight"][negative] /= self.config.keep_negatives
        writer.add_records(split, records)
        is_example = records["user"] == 1 if self.config.lists else slice(None)
        self.splits[split].add(records[is_example])

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
        for split, counted in self.splits.items():
            if not counted.examples:
                if paths := getattr(self.sources, split):
                    raise ValueError(
                        f"{names_of(paths)} has no rows for the {split} split: name a "
                        "file that has some."
                    )
                continue
            if self.config.is_weighted and not counted.weight > 0:
                raise ValueError(
                    f"All {split} rows have weight 0 in column {self.config.weight!r}: "
                    "correct it or --data.weight."
                )
            for name, count in zip(counted.labels, counted.labelled, strict=True):
                if not count:
                    raise ValueError(
                        f"Column {name!r} has no label in any {split} row: correct it "
                        "or --data.labels."
                    )
        if not self.splits["valid"].examples:
            raise ValueError(
                f"No row of {names_of(self.sources.train)} fell into the validation "
                f"split: name a file with --data.valid, or raise --data.valid-fraction "
                f"{self.config.valid_fraction:g}."
            )

    def _report(self, bad_rows: BadRows, facts: dict) -> dict:
        splits = {
            split: {
                "files": [shown(path) for path in getattr(self.sources, split)],
                "stamps": {
                    address_of(path): self.stamps[path][:2]
                    for path in getattr(self.sources, split)
                },
                **counted.report(),
                **({"weight": counted.weight} if self.config.is_weighted else {}),
                **counted.values.report(),
            }
            for split, counted in self.splits.items()
            if counted.examples
        }
        for sample in bad_rows.samples:
            sample["file"] = shown(pathlib.Path(sample["file"]))
        policies = ("bad", "transform", "encoding")
        kinds = ("missing", "nan", "inf", "huge", "negative", "oov")
        totals = sum((Counter(s["totals"]) for s in splits.values()), Counter())
        return {
            "source": self.config.kind,
            "split_rule": self.reader.rule(),
            "notes": [*self._notes(), *self._warnings()],
            "examples": {split: part["examples"] for split, part in splits.items()},
            "policies": {name: getattr(self.config, name) for name in policies},
            "bad_rows": {"count": bad_rows.count, "samples": bad_rows.samples},
            "categorical": facts,
            "totals": {**dict.fromkeys(kinds, 0), **totals},
            "splits": splits,
        }

    def _notes(self) -> list[str]:
        """Returns sentences on weights, sampling, missing labels and lists."""
        config, train, notes = self.config, self.splits["train"], []
        if config.weight is not None:
            notes.append(
                f"Loss and metrics are weighted by column {clip(repr(config.weight))}."
            )
        if (rate := config.keep_negatives) < 1:
            notes.append(
                f"Of the training rows without a click the fraction {rate:.6g} is "
                f"kept, by hashed row number, with {1 / rate:.6g} times the weight, so "
                "that predictions stay calibrated."
            )
        for name, count in zip(train.labels, train.labelled.tolist(), strict=True):
            if lacking := train.examples - count:
                notes.append(
                    f"{lacking:,} training rows have no label {clip(repr(name))} and "
                    "count for the other tasks only."
                )
        for column, n in zip(self.columns.multi, self.encoding.slots, strict=True):
            is_limit = n == config.max_values
            notes.append(
                f"Column {clip(repr(column))}: the first {n} values of a list are "
                f"used, {'the limit' if is_limit else 'the most in a training row'}."
            )
        return notes

    def _warnings(self) -> list[str]:
        """Returns a sentence on each column from which a model cannot learn."""
        train, found = self.splits["train"], []
        for place, column in enumerate(self.columns.dense):
            transform = self.config.inputs.dense[column]
            if cause := train.nothing_left(place, column, transform):
                found.append(
                    f"Warning: nothing is left of dense column {clip(repr(column))} "
                    f"in the {train.examples:,} training rows: {cause}; leave it out, "
                    "or correct it."
                )
        if names := left_out(self.config, self.sources):
            found.append(
                "Warning: not read, as they are folders or their names say no split: "
                f"{clip(listed(names), 200)}."
            )
        by_split = (self.splits[s].values.warnings(f"the {s} rows") for s in SPLITS)
        return [*found, *itertools.chain.from_iterable(by_split)]
