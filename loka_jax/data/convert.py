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

from loka_jax.data import table
from loka_jax.data.batch import Schema
from loka_jax.data.blocks import BadRows, Block
from loka_jax.data.config import MAX_ROWS, DataConfig
from loka_jax.data.encoding import (
    Encoder,
    HashEncoder,
    ValueCounter,
    VocabularyEncoder,
    as_text,
)
from loka_jax.data.files import Sources
from loka_jax.data.permutation import key_of, mix
from loka_jax.data.room import check_disk, memory_bytes
from loka_jax.data.shards import SPLITS, ShardWriter, new_folder, record_dtype
from loka_jax.data.stamps import check_unchanged, stamp_of, unchanged
from loka_jax.data.values import (
    Counts,
    Moments,
    Standardizer,
    clean_dense,
    parse_labels,
    transform_dense,
)

PENDING_BYTES = 1 << 28  # of raw rows that are encoded together
MERGE_BYTES = 1 << 28  # of counts in all fields that are merged together
# The options that determine the contents of the shards.
SETTINGS = (
    "label",
    "dense",
    "categorical",
    "encoding",
    "min_count",
    "hash_buckets",
    "unknown",
    "missing",
    "nan",
    "negative",
    "huge",
    "huge_limit",
    "transform",
    "valid_fraction",
    "max_bad_rows",
)


def convert(
    config: DataConfig,
    sources: Sources,
    target: pathlib.Path,
    progress: Callable[[str, int], None] | None = None,
) -> None:
    """Converts `sources` to a folder of shards; a failure leaves no folder behind.

    Args:
        config: columns and policies.
        sources: the files of each split.
        target: the new folder, which must not exist yet.
        progress: called with the stage's name and the number of rows read so far.

    Raises:
        ValueError: one sentence with file, row or option, and the remedy.
    """
    conversion = _Conversion(config, sources, progress or (lambda stage, rows: None))
    with new_folder(target) as folder, unchanged(conversion.stamps):
        conversion.run(folder)


def settings_of(config: DataConfig) -> dict:
    """Returns the options that determine the shards' contents, as JSON values."""
    label, dense, categorical = _columns(config)
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings |= {"label": label, "dense": dense, "categorical": categorical}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


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


def _columns(config: DataConfig) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    if config.kind == "criteo":
        return table.CRITEO_LABEL, table.CRITEO_DENSE, table.CRITEO_CATEGORICAL
    return config.label, config.dense, config.categorical


class _Conversion:
    """A conversion in progress: its columns, counts and standardizer."""

    def __init__(self, config: DataConfig, sources: Sources, progress):
        self.config, self.sources, self.progress = config, sources, progress
        self.stamps = {path: stamp_of(path) for paths in sources for path in paths}
        self.label, self.dense, self.categorical = _columns(config)
        # Check the columns before anything is read.
        Schema(
            label=self.label,
            dense=self.dense,
            categorical=self.categorical,
            vocab_sizes=(1,) * len(self.categorical),
        )
        if not sources.valid and not config.valid_fraction > 0:
            raise ValueError(
                "There are no validation rows: name a file with --data.valid, or set "
                "--data.valid-fraction above 0."
            )
        self.dtype = record_dtype(len(self.dense), len(self.categorical))
        self.rows_learned = 0
        self.counts = {split: Counts() for split in SPLITS}
        self.examples: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.positives: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.standardizer = Standardizer(np.zeros(len(self.dense)), np.ones(1))

    def run(self, folder: pathlib.Path) -> None:
        encoders = self._learn()
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
                self._write(writer, split, pending.pop(split), encoders)
                held[split] = 0
        for split, blocks in pending.items():
            self._write(writer, split, blocks, encoders)
        self._check_splits()
        for field, encoder in enumerate(encoders):
            if isinstance(encoder, VocabularyEncoder):
                writer.add_vocabulary(field, encoder.values)
        schema = Schema(
            label=self.label,
            dense=self.dense,
            categorical=self.categorical,
            vocab_sizes=tuple(encoder.rows for encoder in encoders),
        )
        writer.finish(
            schema,
            sources=[
                {"file": path.name, "bytes": s.size, "modified_ns": s.modified_ns}
                for path, s in self.stamps.items()
            ],
            settings=settings_of(self.config),
            report=self._report(bad_rows),
        )

    def _blocks(
        self, splits: tuple[str, ...], bad_rows: BadRows, stage: str
    ) -> Iterator[tuple[str, Block]]:
        """Yields each block with its split, splitting off validation rows if needed."""
        columns = (self.label, *self.dense, *self.categorical)
        read = 0
        for split in splits:
            done = 0  # rows read of this split's files
            for path in getattr(self.sources, split):
                for block in self._reader(path)(str(path), columns, bad_rows):
                    rows = block.table.num_rows
                    read += rows
                    self.progress(stage, read)
                    if split == "train" and not self.sources.valid:
                        yield from self._split_off(block, done, splits)
                    else:
                        yield split, block
                    done += rows

    def _reader(self, path: pathlib.Path):
        is_criteo = self.config.kind == "criteo"
        return table.read_criteo if is_criteo else table.reader(path)

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

    def _learn(self) -> list[Encoder]:
        """Learns encoders and standardizer; reads the training rows only if needed."""
        use_hash = self.config.encoding == "hash"
        if use_hash and self.config.transform != "standardize":
            return self._hashes()
        merge_bytes = MERGE_BYTES // max(len(self.categorical), 1)
        counters = [ValueCounter(merge_bytes) for _ in self.categorical]
        moments = Moments(len(self.dense))
        bad_rows = BadRows(self.config.max_bad_rows)
        for _, block in self._blocks(("train",), bad_rows, "reading"):
            self.rows_learned += block.table.num_rows
            if self.config.transform == "standardize":
                moments.add(clean_dense(block, self.config, self.dense, Counts()))
            if not use_hash:
                for counter, column in zip(counters, self.categorical, strict=True):
                    counter.add(as_text(block, column))
                self._check_memory(counters)
        self.standardizer = moments.result()
        if use_hash:
            return self._hashes()
        pairs = zip(self.categorical, counters, strict=True)
        return [self._vocabulary(column, counter) for column, counter in pairs]

    def _check_memory(self, counters: list[ValueCounter]) -> None:
        sizes = [counter.merged_bytes for counter in counters]
        if (total := sum(sizes)) > (limit := memory_bytes() // 2):
            largest = self.categorical[sizes.index(max(sizes))]
            raise ValueError(
                f"The different values of the categorical columns take {total:,} "
                f"bytes, most of them in {largest!r}, and {limit:,} are allowed, half "
                "of the memory: leave the column out, or use --data.encoding hash."
            )

    def _hashes(self) -> list[Encoder]:
        buckets = self.config.hash_buckets
        return [HashEncoder(column, buckets) for column in self.categorical]

    def _vocabulary(self, column: str, counter: ValueCounter) -> Encoder:
        values = counter.vocabulary(self.config.min_count)
        if len(values) >= MAX_ROWS:
            raise ValueError(
                f"Column {column!r} has {len(values)} values, more than an int32 id "
                "can tell apart: use --data.encoding hash or a larger --data.min-count."
            )
        return VocabularyEncoder(values)

    def _write(
        self,
        writer: ShardWriter,
        split: str,
        blocks: list[Block],
        encoders: list[Encoder],
    ) -> None:
        parts = [self._numbers(split, block) for block in blocks]
        records = np.empty(
            sum(len(labels) for labels, _ in parts),
            self.dtype,
        )
        records["label"] = np.concatenate([labels for labels, _ in parts])
        records["dense"] = np.concatenate([dense for _, dense in parts])
        for field, encoder in enumerate(encoders):
            # All blocks in one call, as each call may build a large lookup table.
            records["ids"][:, field] = self._ids(split, blocks, field, encoder)
        writer.add_rows(split, records)
        self.examples[split] += len(records)
        self.positives[split] += int(records["label"].sum(dtype=np.float64))

    def _numbers(self, split: str, block: Block) -> tuple[np.ndarray, np.ndarray]:
        labels = parse_labels(block, self.label)
        dense = clean_dense(block, self.config, self.dense, self.counts[split])
        return labels, transform_dense(dense, self.config, self.standardizer)

    def _ids(
        self, split: str, blocks: list[Block], field: int, encoder: Encoder
    ) -> np.ndarray:
        column = self.categorical[field]
        values = pa.chunked_array([as_text(block, column) for block in blocks])
        ids = encoder.encode(values)
        missing = np.asarray(values.is_null())
        unknown = (ids == 0) & ~missing
        counts = self.counts[split]
        counts.add(column, "missing", int(np.count_nonzero(missing)))
        counts.add(column, "oov", int(np.count_nonzero(unknown)))
        if unknown.any() and (refusal := self._unknown_refusal(split)):
            at = int(np.argmax(unknown))
            rows = np.concatenate([block.rows for block in blocks])
            file = np.repeat([b.file for b in blocks], [len(b.rows) for b in blocks])
            raise ValueError(
                f"{file[at]} row {rows[at]} column {column!r} holds "
                f"{values[at].as_py()[:40]!r}, {refusal}"
            )
        return ids

    def _unknown_refusal(self, split: str) -> str | None:
        """Returns why a split may not hold values without an id, or None."""
        if split == "train" and self.config.min_count == 1:
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
