"""Opens the data that a `DataConfig` describes as train, valid and test splits.

Files are converted to shards once, in a cache. The identity of the data tells one data
set from another: a dict of JSON values with one part for the schema, the vocabularies
and each split, so that two of them can be compared part by part. It depends on what the
data hold, not on paths or times.
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from jax.sharding import NamedSharding

from loka_jax import saved_format
from loka_jax.cache_folder import cache_folder
from loka_jax.data import generated, planted, planted_events
from loka_jax.data.batch import Dataset, Schema
from loka_jax.data.config import (
    ENCODING_SETTINGS,
    SEQUENCE_SETTINGS,
    SETTINGS,
    DataConfig,
    without_files,
)
from loka_jax.data.convert import convert
from loka_jax.data.crosses import CrossedDataset, crosses_of
from loka_jax.data.event_options import HISTORY
from loka_jax.data.events import EventDataset, layout_of
from loka_jax.data.files import Sources, filters_of, find_sources, left_out
from loka_jax.data.places import address_of, stamp_of
from loka_jax.data.reader import ShardDataset
from loka_jax.data.saved_encoding import digest_of, load_encoding
from loka_jax.data.sequences import make_log
from loka_jax.data.shards import SPLITS, ShardFolder, is_shard_folder, open_shards

_READING = 2  # raised where the same files give other rows or ids


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The splits of a data set.

    Attributes:
        test: the examples of the final evaluation; None if only `valid` can serve.
        report: counts, policies and origin of the data, as JSON values.
        identity: what decides which rows and ids training sees, as JSON values.
        folder: the folder of the shards; None for generated data.
    """

    train: Dataset
    valid: Dataset
    test: Dataset | None
    report: dict
    identity: dict
    folder: ShardFolder | None = None

    def over(self, sharding: NamedSharding) -> "Splits":
        """Returns the splits for batches that lie on several devices of one process.

        Generated examples are made there; others are read by the host.
        """
        splits = self.train, self.valid, self.test
        datasets = [x for x in splits if isinstance(x, generated.GeneratedDataset)]
        if len(datasets) < len(splits):
            return self
        train, valid, test = generated.spread_over(sharding, *datasets)
        return dataclasses.replace(self, train=train, valid=valid, test=test)

    def divided(self, devices: int) -> "Splits":
        """Returns the splits for batches of which each device has a part.

        Sequences of an event log are dealt to them; others lie in the order of devices.
        """
        logs = [(k, x) for k, x in vars(self).items() if isinstance(x, EventDataset)]
        return dataclasses.replace(self, **{name: x.over(devices) for name, x in logs})

    def crossed(self, entries: tuple[str, ...]) -> "Splits":
        """Returns the splits with crosses (`loka_jax.data.crosses`) in their batches.

        Raises:
            ValueError: for an entry that is no cross, or examples that are generated.
        """
        if entries and self.folder is None:
            raise ValueError(
                "--embedding.crosses are for data of files: leave them out."
            )
        crosses = crosses_of(entries, self.train.schema)
        if not crosses:
            return self
        splits = (self.train, self.valid, self.test)
        train, valid, test = (x and CrossedDataset(x, crosses) for x in splits)
        assert train is not None and valid is not None
        return dataclasses.replace(self, train=train, valid=valid, test=test)

    def ahead(self, step: int, count: int, batch_size: int) -> Dataset:
        """Returns the examples of `count` training batches from `step` on, of a stream.

        They are fewer at its end.
        """
        assert isinstance(self.train, EventDataset)
        return self.train.window(step * batch_size, count * batch_size)

    @property
    def left_out(self) -> int:
        """The events left out of histories so far, as batches had no room for them."""
        return self.train.left_out if isinstance(self.train, EventDataset) else 0

    @property
    def files(self) -> dict[str, dict]:
        """The size and time of each file, by its address, by split; none of shards."""
        splits = self.report.get("splits", {})
        return {name: part.get("stamps", {}) for name, part in splits.items()}

    @property
    def encoding_digest(self) -> str | None:
        """The digest of the encoding; None for generated data."""
        return None if self.folder is None else digest_of(self.folder)


def open_data(
    config: DataConfig, *, seed: int, base: ShardFolder | None = None
) -> Splits:
    """Returns the splits of the data that `config` describes.

    Args:
        seed: selects the held-out examples of generated data.
        base: a folder with the encoding to use, see `loka_jax.data.saved_encoding`;
            None to learn one from the training rows.

    Raises:
        ValueError: one sentence with the file, row or option, and the remedy.
    """
    if base is not None:
        config = _with_options_of(base, config)
    if config.kind == "generated":
        return _open_generated(config, seed)
    if config.kind == "events":
        return _open_planted_events(config, seed)
    path = shards_of(config)
    if path is None:
        folder = open_shards(cached_shards(config, find_sources(config), base))
        return _splits(folder, config)
    folder = open_shards(path)
    for name in ("train", "valid", "test"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{folder.path} holds shards of all splits: leave out --data.{name}."
            )
    remedy = "convert the data again"
    _require_settings(config, folder, SETTINGS, "was converted with", remedy)
    if base is not None and digest_of(folder) != digest_of(base):
        raise ValueError(
            f"{folder.path} was converted with another vocabulary than the run's: "
            "name the files that it was converted from with --data.path."
        )
    return _splits(folder, config)


def shards_of(config: DataConfig) -> pathlib.Path | None:
    """Returns the folder of shards that `config` names; None if it names files."""
    path = pathlib.Path(*config.paths[:1]).expanduser()
    return path if len(config.paths) == 1 and is_shard_folder(path) else None


def _splits(folder: ShardFolder, config: DataConfig) -> Splits:
    if folder.schema.user is not None:
        datasets = _event_datasets(folder.schema, folder.records, config, folder.path)
    else:
        datasets = {
            split: ShardDataset(folder.schema, records, f"{folder.path} ({split})")
            for split, records in folder.records.items()
        }
    if not {"train", "valid"} <= datasets.keys() or not folder.report:
        raise ValueError(
            f"{folder.path} lacks training or validation rows, or their report: "
            "convert the data again."
        )
    return Splits(
        train=datasets["train"],
        valid=datasets["valid"],
        test=datasets.get("test"),
        report=folder.report,
        identity=_identity_of_shards(folder) | _sequences(config),
        folder=folder,
    )


def _event_datasets(
    schema: Schema,
    records: Mapping[str, np.ndarray],
    config: DataConfig,
    name: object = "the event log",
) -> dict[str, EventDataset]:
    """Returns the splits of an event log, with histories of the events of all."""
    are_lists = schema.user == HISTORY
    log = make_log(list(records.values()), are_lists=are_lists)
    layout = layout_of(config, schema)
    return {
        split: EventDataset(
            *(schema, log, number, layout),
            stream=config.stream and split == "train",
            name=f"{name} ({split})",
        )
        for number, split in enumerate(records)
    }


def _sequences(config: DataConfig) -> dict:
    """Returns what decides the histories of an event log; {} of other data."""
    if not config.is_log:
        return {}
    options = {name: getattr(config, name) for name in SEQUENCE_SETTINGS}
    return {"sequences": options | {"stratified": not config.stream}}


def _open_planted_events(config: DataConfig, seed: int) -> Splits:
    schema = planted_events.schema_of_events(config)
    sizes = generated.split_sizes(config)
    logs = {
        name: planted_events.planted_log(config, size, seed=seed, split=number)
        for number, (name, size) in enumerate(sizes.items())
    }
    records = {name: log.records for name, log in logs.items()}
    ne = {
        name: {
            known: planted_events.normalized_entropy(chance, log.records["label"])
            for known, chance in log.best.items()
        }
        for name, log in logs.items()
    }
    known = ", ".join(f"{value:.5f} with {name}" for name, value in ne["test"].items())
    report = {
        "source": "events",
        "split_rule": "train, valid and test are events of different users",
        "examples": sizes,
        "notes": [f"Best NE of the test events: {known}."],
        "best_possible_ne": ne["test"]["the order"],
        "true_model_ne": {name: of["the order"] for name, of in ne.items()},
        "best_ne": ne,
    }
    identity = identity_of_generated(config, seed) | _sequences(config)
    train, valid, test = _event_datasets(schema, records, config).values()
    return Splits(train=train, valid=valid, test=test, report=report, identity=identity)


def _with_options_of(base: ShardFolder, config: DataConfig) -> DataConfig:
    """Returns the options with those of an encoding."""
    stored = base.manifest.config
    if config.kind != stored.kind:
        raise ValueError(
            f"{base.path} encodes data of kind {stored.kind}, not {config.kind}: set "
            f"--data.kind {stored.kind}."
        )
    names = (*ENCODING_SETTINGS, "reserve_rows")
    _require_settings(config, base, names, "encodes with", "train a new run")
    values = {name: getattr(stored, name) for name in names}
    return dataclasses.replace(config, **values)


def _require_settings(
    config: DataConfig,
    folder: ShardFolder,
    names: tuple[str, ...],
    relation: str,
    remedy: str,
) -> None:
    """Raises ValueError for an option that is no default and not that of the folder."""
    default, requested = DataConfig(), without_files(config)
    for name in names:
        value = getattr(requested, name)
        stored = getattr(folder.manifest.config, name)
        if getattr(config, name) != getattr(default, name) and value != stored:
            raise ValueError(
                f"{folder.path} {relation} {name} {str(stored)[:80]}, not "
                f"{value}: leave out --data.{name.replace('_', '-')} or {remedy}."
            )


def _open_generated(config: DataConfig, seed: int) -> Splits:
    world = planted.make_world(config)
    sizes = generated.split_sizes(config)
    train, valid, test = (
        generated.GeneratedDataset(config, world, name, num_examples=size, seed=seed)
        for name, size in sizes.items()
    )
    ne, ne_error = generated.best_possible_ne(config, world)
    report = {
        "source": "generated",
        "split_rule": "train, valid and test are streams of different keys",
        "examples": sizes,
        "best_possible_ne": ne,
        "best_possible_ne_stderr": ne_error,
        "true_model_ne": {
            "valid": generated.true_model_ne(valid),
            "test": generated.true_model_ne(test),
        },
    }
    identity = identity_of_generated(config, seed)
    return Splits(train=train, valid=valid, test=test, report=report, identity=identity)


def cached_shards(
    config: DataConfig, sources: Sources, base: ShardFolder | None = None
) -> pathlib.Path:
    """Returns the cached folder of the sources' shards, converting them if needed.

    The folder's name is a digest of the files' paths and stamps and of the options, so
    a changed file or option gets a new folder. If two runs convert at the same time,
    the first to finish wins. `base` is a folder with the encoding to start from.
    """
    name = _cache_name(config, sources)
    root = pathlib.Path(config.cache or cache_folder("data")).expanduser()
    if base is not None:
        for folder in sorted(root.glob(f"{name}*")):
            try:
                if digest_of(open_shards(folder)) == digest_of(base):
                    return folder
            except ValueError:  # damaged, or in another format
                continue
        name = f"{name}-{digest_of(base)[:16]}"
    target = root / name
    if is_shard_folder(target):
        try:
            open_shards(target)
            return target
        except ValueError:  # damaged; a cached folder can be rebuilt
            shutil.rmtree(target)
    encoding = None if base is None else load_encoding(base)
    try:
        convert(config, sources, target, base=encoding)
    except ValueError:
        if not is_shard_folder(target):  # no other run finished it meanwhile
            raise
    if find_sources(config) != sources:
        raise ValueError(
            f"files appeared in {', '.join(config.paths)} while they were read, or are "
            "gone: wait until all are complete, then start again."
        )
    return target


def _cache_name(config: DataConfig, sources: Sources) -> str:
    files = [
        [split, address_of(path), *stamp_of(path)]
        for split, paths in sources._asdict().items()
        for path in paths
    ]
    options = msgspec.to_builtins(without_files(config))
    key = [saved_format.SHARDS, _READING, options, files]
    key += left_out(config, sources)  # which the report names
    key += sorted(filters_of(config).items())
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def _identity_of_shards(folder: ShardFolder) -> dict:
    """Returns the identity of converted data, with digests in place of contents."""
    splits: dict[str, dict | None] = dict.fromkeys(SPLITS)
    for split in folder.records:
        entry = folder.manifest.files[f"{split}.records"]
        splits[split] = {"rows": entry.count, "digest": entry.sha256}
    return {
        "source": "files",
        "schema": _schema(folder.schema),
        "vocabulary": folder.vocabulary_digests,
        **splits,
    }


def identity_of_generated(config: DataConfig, seed: int) -> dict:
    """Returns the identity of generated data.

    `model` has the options of the planted model; the table sizes stand in the schema.
    """
    sizes = generated.split_sizes(config)
    splits = {split: {"rows": rows, "seed": seed} for split, rows in sizes.items()}
    is_log = config.is_log
    schema = planted_events.schema_of_events if is_log else generated.schema_of
    return {
        "source": config.kind,
        "schema": _schema(schema(config)),
        "model": {name: getattr(config, name) for name in ("signal", "click_rate")},
        **splits,
    }


def _schema(schema: Schema) -> dict:
    # What data have by default is left out, so that it can be added to a schema.
    parts = {
        field.name: value
        for field in dataclasses.fields(schema)
        if (value := getattr(schema, field.name)) != field.default
    }
    return {k: list(v) if isinstance(v, tuple) else v for k, v in parts.items()}
