"""Opens the data that a `DataConfig` describes as train, valid and test splits."""

import dataclasses
import pathlib
from dataclasses import dataclass

from jax.sharding import NamedSharding

from loka_jax.data import generated, planted
from loka_jax.data.batch import Dataset
from loka_jax.data.cache import cached_shards
from loka_jax.data.config import DataConfig
from loka_jax.data.files import existing, find_sources
from loka_jax.data.identity import identity_of_generated, identity_of_shards
from loka_jax.data.manifest import check_report
from loka_jax.data.reader import ShardDataset
from loka_jax.data.saved_encoding import config_of, digest_of
from loka_jax.data.settings import ENCODING_SETTINGS, SETTINGS, settings_of
from loka_jax.data.shards import ShardFolder, is_shard_folder, open_shards


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The splits of a data set.

    Attributes:
        train: the training examples.
        valid: the examples that decide when training stops.
        test: the examples of the final evaluation; None if only `valid` can serve.
        report: counts, policies and origin of the data, as JSON values.
        identity: what decides which rows and ids training sees, as JSON values: equal
            for equal data, wherever it lies; see `loka_jax.data.identity`.
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

        Args:
            sharding: of the rows of a batch.
        """

        splits = self.train, self.valid, self.test
        datasets = [x for x in splits if isinstance(x, generated.GeneratedDataset)]
        if len(datasets) < len(splits):
            return self
        train, valid, test = generated.spread_over(sharding, *datasets)
        return dataclasses.replace(self, train=train, valid=valid, test=test)

    @property
    def encoding_digest(self) -> str | None:
        """The digest of the encoding; None for generated data."""
        return None if self.folder is None else digest_of(self.folder)


def open_data(
    config: DataConfig, *, seed: int, base: ShardFolder | None = None
) -> Splits:
    """Returns the splits of the data that `config` describes.

    Args:
        config: the data and its preprocessing.
        seed: selects the held-out examples of generated data; unused for files.
        base: a folder with the encoding to use, see `loka_jax.data.saved_encoding`;
            None to learn one from the training rows.

    Raises:
        ValueError: one sentence with the file, row or option, and the remedy.
    """
    if base is not None:
        config = _with_encoding(config, base)
    if config.kind == "generated":
        return _open_generated(config, seed)
    if config.path is not None and is_shard_folder(existing(config.path)):
        folder = open_shards(pathlib.Path(config.path).expanduser())
        _check_settings(config, folder)
        if base is not None and digest_of(folder) != digest_of(base):
            raise ValueError(
                f"{folder.path} was converted with another vocabulary than the run's: "
                "name the files that it was converted from with --data.path."
            )
    else:
        folder = open_shards(cached_shards(config, find_sources(config), base))
    return _splits(folder)


def _splits(folder: ShardFolder) -> Splits:
    check_report(folder.path, folder.report)
    train, valid, test = (
        ShardDataset(folder.schema, folder.shards[split], f"{folder.path} ({split})")
        if folder.shards[split]
        else None
        for split in ("train", "valid", "test")
    )
    if train is None or valid is None:
        raise ValueError(
            f"{folder.path} lacks training or validation shards: convert the data "
            "again."
        )
    return Splits(
        train=train,
        valid=valid,
        test=test,
        report=folder.report,
        identity=identity_of_shards(folder),
        folder=folder,
    )


def _with_encoding(config: DataConfig, base: ShardFolder) -> DataConfig:
    """Returns the options with those of an encoding.

    Raises:
        ValueError: if one that differs from the default is another there.
    """
    names = (*ENCODING_SETTINGS, "reserve_rows")
    if config.kind != base.kind:
        raise ValueError(
            f"{base.path} encodes data of kind {base.kind}, not {config.kind}: set "
            f"--data.kind {base.kind}."
        )
    _require_settings(config, base, names, "encodes with", "train a new run")
    stored = config_of(base)
    values = {name: getattr(stored, name) for name in names}
    return dataclasses.replace(config, **values)


def _check_settings(config: DataConfig, folder: ShardFolder) -> None:
    """Checks that options differing from the defaults agree with the shards.

    Raises:
        ValueError: with the option and both values.
    """
    for name in ("valid", "test"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{folder.path} holds shards of all splits: leave out --data.{name}."
            )
    _require_settings(
        config, folder, SETTINGS, "was converted with", "convert the data again"
    )


def _require_settings(
    config: DataConfig,
    folder: ShardFolder,
    names: tuple[str, ...],
    relation: str,
    remedy: str,
) -> None:
    """Raises ValueError for an option that is no default and not that of the folder."""
    defaults = {f.name: f.default for f in dataclasses.fields(DataConfig)}
    requested = settings_of(config)
    for name in names:
        stored = folder.settings.get(name)
        if getattr(config, name) != defaults[name] and requested[name] != stored:
            raise ValueError(
                f"{folder.path} {relation} {name} {str(stored)[:80]}, not "
                f"{requested[name]}: leave out --data.{name.replace('_', '-')} or "
                f"{remedy}."
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
    return Splits(
        train=train,
        valid=valid,
        test=test,
        report=report,
        identity=identity_of_generated(config, seed),
    )
