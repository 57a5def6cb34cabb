"""The encoding of a run on disk: a folder of shards without rows.

It holds what turns raw rows into a model's inputs (columns, policies, vocabularies,
means) and nothing else, so that a trained model outlives the files that it was trained
on, and its ids never move.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from loka_jax.data.config import ENCODING_SETTINGS, SETTINGS, DataConfig
from loka_jax.data.encoding import Encoder, VocabularyEncoder, hash_encoder
from loka_jax.data.manifest import Unusable
from loka_jax.data.records import Encoding
from loka_jax.data.shards import (
    ShardFolder,
    ShardWriter,
    new_folder,
    open_shards,
    vocabulary_name,
)
from loka_jax.data.values import Standardizer
from loka_jax.terminal import clip


def digest_of(folder: ShardFolder) -> str:
    """Returns a digest of the encoding: equal if all rows get equal inputs."""
    manifest = folder.manifest
    parts = {
        "kind": manifest.kind,
        "schema": dataclasses.asdict(folder.schema),
        "settings": {name: manifest.settings.get(name) for name in ENCODING_SETTINGS},
        "standardizer": manifest.standardizer,
        "vocabulary": folder.vocabulary_digests,
        "forms": manifest.forms,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def save_encoding(folder: ShardFolder, target: pathlib.Path) -> None:
    """Copies the encoding of a folder of shards to a new folder, in one step.

    Raises:
        ValueError: if the target exists already or cannot be written.
    """
    with new_folder(target, "--workdir") as partial:
        writer = ShardWriter(partial)
        for field, column in enumerate(folder.schema.fields):
            if column in folder.vocabulary_digests:
                writer.add_vocabulary(field, _values(folder, field))
        names = ("kind", "settings", "forms", "standardizer")
        entries = {name: getattr(folder.manifest, name) for name in names}
        writer.finish(folder.schema, sources=[], report={}, **entries)


def open_encoding(path: pathlib.Path, digest: str) -> ShardFolder:
    """Returns the folder that `save_encoding` wrote, after comparing all digests.

    Args:
        path: the folder.
        digest: the encoding's digest, as a checkpoint names it.

    Raises:
        ValueError: if it is missing, damaged, or another encoding.
    """
    try:
        folder = open_shards(path, verify=True)
    except Unusable as error:
        raise _lost(path, error.reason) from None
    if digest_of(folder) != digest:
        raise _lost(path, "it is not the one that the checkpoint was trained with")
    return folder


def _lost(path: pathlib.Path, reason: str) -> ValueError:
    return ValueError(
        f"{path}, the encoding of the run, cannot be used ({reason}): restore it from "
        "a copy, or train again."
    )


def load_encoding(folder: ShardFolder) -> Encoding:
    """Returns the encoding of a folder of shards.

    Raises:
        ValueError: if its settings or vocabularies are not what conversions write.
    """
    standardizer = Standardizer(np.zeros(len(folder.schema.dense)), np.ones(1))
    if (parts := folder.manifest.standardizer) is not None:
        standardizer = Standardizer(np.array(parts["mean"]), np.array(parts["std"]))
    return Encoding(
        config=config_of(folder),
        encoders=tuple(_encoders(folder)),
        slots=folder.schema.slots,
        forms=folder.manifest.forms,
        standardizer=standardizer,
    )


def values_of(
    folder: ShardFolder, ids: Mapping[str, Sequence[int]]
) -> dict[str, list[str | None]]:
    """Returns the values that have these ids, by column.

    One vocabulary is in memory at a time.

    Args:
        folder: shards, or an encoding.
        ids: of some columns.

    Returns:
        for each id its value; None where many values share it: id 0, and hashes.
    """
    by_column = {}
    for column, encoder in zip(folder.schema.fields, _encoders(folder), strict=True):
        values = encoder.values if isinstance(encoder, VocabularyEncoder) else ()
        by_column[column] = [
            str(values[i - 1]) if 1 <= i <= len(values) else None
            for i in ids.get(column, ())
        ]
    return by_column


def config_of(folder: ShardFolder) -> DataConfig:
    """Returns the options that a conversion was made with, but for its files.

    Raises:
        ValueError: if they are not what conversions write.
    """
    values = {name: folder.manifest.settings.get(name) for name in SETTINGS}
    if folder.manifest.kind == "criteo":  # whose columns are fixed
        del values["dense"], values["categorical"]
    try:
        return msgspec.convert(values | {"kind": folder.manifest.kind}, DataConfig)
    except msgspec.ValidationError as error:
        raise Unusable(folder.path, f"its settings: {clip(error, 200)}") from None


def _encoders(folder: ShardFolder) -> Iterator[Encoder]:
    schema, config = folder.schema, config_of(folder)
    for column, rows in zip(schema.fields, schema.vocab_sizes, strict=True):
        owner = config.owners.get(column, column)
        if (hashes := hash_encoder(config, owner)) is not None:
            if hashes.rows != rows:
                raise Unusable(folder.path, f"{column!r} has not {hashes.rows} rows")
            yield hashes
            continue
        values = _values(folder, schema.fields.index(owner))
        if (reserved := rows - 1 - len(values)) < 0:
            raise Unusable(folder.path, f"{column!r} has more values than rows")
        yield VocabularyEncoder(values, reserved)


def _values(folder: ShardFolder, field: int) -> pa.Array:
    path = folder.path / vocabulary_name(field)
    try:
        values = parquet.read_table(path, page_checksum_verification=True)["value"]
        return values.combine_chunks().cast(pa.large_string())
    except (pa.ArrowException, KeyError, OSError) as error:
        raise Unusable(path, f"it is no vocabulary: {str(error)[:80]}") from None
