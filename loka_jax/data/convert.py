"""Converts text or Parquet files to shards in two passes.

The first pass reads the training rows and learns the vocabularies and, if requested,
means and standard deviations; the second encodes every split. Nothing is learned from
validation or test rows.
"""

import pathlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from loka_jax.data.batch import Schema
from loka_jax.data.blocks import BadRows, Block
from loka_jax.data.config import DataConfig
from loka_jax.data.encoding import VocabularyEncoder
from loka_jax.data.files import Sources
from loka_jax.data.learn import Learner
from loka_jax.data.permutation import key_of, mix
from loka_jax.data.records import Encoding
from loka_jax.data.room import check_disk
from loka_jax.data.settings import columns_of, settings_of
from loka_jax.data.shards import SPLITS, ShardWriter, new_folder, record_dtype
from loka_jax.data.stamps import check_unchanged, stamp_of, unchanged
from loka_jax.data.table import reader_of
from loka_jax.data.values import Counts

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


def split_rule(sources: Sources, config: DataConfig) -> str:
    """Returns a phrase that says which rows are the validation rows."""
    if sources.valid:
        return f"validation rows are those of {_names(sources.valid)}"
    return (
        f"validation rows are the fraction {config.valid_fraction:g} of the training "
        "file's rows with the lowest hashed row number (SplitMix64)"
    )


def _names(paths: tuple[pathlib.Path, ...]) -> str:
    return ", ".join(path.name for path in paths)


class _Conversion:
    """A conversion in progress: its columns, counts and encoding."""

    def __init__(self, config: DataConfig, sources: Sources, progress, base):
        self.config, self.sources, self.progress = config, sources, progress
        self.base: Encoding | None = base
        self.stamps = {path: stamp_of(path) for paths in sources for path in paths}
        self.columns = columns_of(config)
        # Check the columns before anything is read.
        num_fields = len(self.columns.categorical)
        Schema(**self.columns._asdict(), vocab_sizes=(1,) * num_fields)
        if not sources.valid and not config.valid_fraction > 0:
            raise ValueError(
                "There are no validation rows: name a file with --data.valid, or set "
                "--data.valid-fraction above 0."
            )
        self.dtype = record_dtype(len(self.columns.dense), num_fields)
        self.rows_learned = 0
        self.counts = {split: Counts() for split in SPLITS}
        self.examples: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.positives: dict[str, int] = dict.fromkeys(SPLITS, 0)

    def run(self, folder: pathlib.Path) -> None:
        self.encoding = self._learn()
        check_unchanged(self.stamps)
        needed = self.rows_learned * self.dtype.itemsize
        check_disk(folder, needed, f"{self.rows_learned:,} training rows")
        writer = ShardWriter(folder)
        bad_rows = BadRows(self.config.max_bad_rows)
        pending: defaultdict[str, list[Block]] = defaultdict(list)
        held: Counter[str] = Counter()  # bytes
        for split, block in self._blocks(SPLITS, bad_rows, "encoding"):
            pending[split].append(block)
            held[split] += block.nbytes
            if held[split] >= PENDING_BYTES:
                self._write(writer, split, pending.pop(split))
                held[split] = 0
        for split, blocks in pending.items():
            self._write(writer, split, blocks)
        self._check_splits()
        for field, encoder in enumerate(self.encoding.encoders):
            if isinstance(encoder, VocabularyEncoder):
                writer.add_vocabulary(field, encoder.values)
        writer.finish(
            self.encoding.schema,
            sources=[
                {"file": path.name, "bytes": s.size, "modified_ns": s.modified_ns}
                for path, s in self.stamps.items()
            ],
            kind=self.config.kind,
            settings=settings_of(self.config),
            standardizer=self._standardizer(),
            report=self._report(bad_rows),
        )

    def _blocks(
        self, splits: tuple[str, ...], bad_rows: BadRows, stage: str
    ) -> Iterator[tuple[str, Block]]:
        """Yields each block with its split, splitting off validation rows if needed."""
        label, dense, categorical = self.columns
        columns = (label, *dense, *categorical)
        read = 0
        for split in splits:
            done = 0  # rows read of this split's files
            for path in getattr(self.sources, split):
                read_file = reader_of(self.config, path)
                for block in read_file(str(path), columns, bad_rows):
                    rows = block.table.num_rows
                    read += rows
                    self.progress(stage, read)
                    if split == "train" and not self.sources.valid:
                        yield from self._split_off(block, done, splits)
                    else:
                        yield split, block
                    done += rows

    def _split_off(
        self, block: Block, done: int, splits: tuple[str, ...]
    ) -> Iterator[tuple[str, Block]]:
        is_valid = is_validation_row(
            np.arange(done, done + block.table.num_rows), self.config.valid_fraction
        )
        for split, chosen in (("train", ~is_valid), ("valid", is_valid)):
            if split in splits and chosen.any():
                part = block.table.filter(pa.array(chosen))
                yield split, Block(part, block.rows[chosen], block.file)

    def _learn(self) -> Encoding:
        """Returns the encoding; reads one block if it depends on no training rows."""
        learner = Learner(self.config, self.base)
        bad_rows = BadRows(self.config.max_bad_rows)
        for _, block in self._blocks(("train",), bad_rows, "reading"):
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
        writer.add_rows(split, records)
        self.examples[split] += len(records)
        self.positives[split] += int(records["label"].sum(dtype=np.float64))

    def _unknown_refusal(self, split: str) -> str | None:
        """Returns why a split may not hold values without an id, or None."""
        learned = self.base is None and self.config.min_count == 1
        if split == "train" and learned:
            # The file's stamp tells it, too, but not on every network disk.
            return "which it did not when it was read first: start again."
        if split != "train" and self.config.unknown == "error":
            return (
                "which is not in the training rows: correct it or set --data.unknown "
                "oov."
            )
        return None

    def _check_splits(self) -> None:
        for split in SPLITS:
            paths = getattr(self.sources, split)
            if paths and not self.examples[split]:
                raise ValueError(
                    f"{_names(paths)} has no rows for the {split} split: name a file "
                    "that has some."
                )
        if not self.examples["valid"]:
            raise ValueError(
                f"No row of {_names(self.sources.train)} fell into the validation "
                f"split: name a file with --data.valid, or raise --data.valid-fraction "
                f"{self.config.valid_fraction:g}."
            )

    def _report(self, bad_rows: BadRows) -> dict:
        policies = ("missing", "nan", "negative", "huge", "huge_limit", "unknown")
        splits = {split: self._split_report(split) for split in SPLITS}
        splits = {split: part for split, part in splits.items() if part["examples"]}
        for sample in bad_rows.samples:
            sample["file"] = pathlib.Path(sample["file"]).name
        return {
            "source": self.config.kind,
            "split_rule": split_rule(self.sources, self.config),
            "examples": {split: part["examples"] for split, part in splits.items()},
            "policies": {name: getattr(self.config, name) for name in policies}
            | {"transform": self.config.transform, "encoding": self.config.encoding},
            "bad_rows": {"count": bad_rows.count, "samples": bad_rows.samples},
            "categorical": self.facts,
            "totals": _sum_totals(splits),
            "splits": splits,
        }

    def _split_report(self, split: str) -> dict:
        return {
            "files": [path.name for path in getattr(self.sources, split)],
            "examples": self.examples[split],
            "positives": self.positives[split],
            **self.counts[split].report(),
        }


def is_validation_row(row: np.ndarray, fraction: float) -> np.ndarray:
    """Returns a mask of the rows, numbered from 0 over all files, to validate on."""
    hashed = mix(row.astype(np.uint64) ^ key_of(0))
    # 53 bits, so that the comparison is exact in float64.
    return (hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < fraction


def _sum_totals(splits: dict) -> dict:
    kinds = ("missing", "nan", "inf", "huge", "negative", "oov")
    totals = [split["totals"] for split in splits.values()]
    return {kind: sum(total.get(kind, 0) for total in totals) for kind in kinds}
