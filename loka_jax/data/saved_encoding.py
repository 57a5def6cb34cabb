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

import pyarrow as pa
from pyarrow import parquet

from loka_jax.data.config import ENCODING_SETTINGS
from loka_jax.data.encoding import Encoder, VocabularyEncoder, hash_encoder
from loka_jax.data.records import Encoding
from loka_jax.data.shards import (
    ShardFolder,
    ShardWriter,
    Unusable,
    new_folder,
    open_shards,
    vocabulary_name,
)
from loka_jax.data.transform_options import Input


def digest_of(folder: ShardFolder) -> str:
    """Returns a digest of the encoding: equal if all rows get equal inputs."""
    manifest = folder.manifest
    names = ("kind", *ENCODING_SETTINGS)
    schema = dataclasses.asdict(folder.schema)
    settings = {name: getattr(manifest.config, name) for name in names}
    if not settings["lists"]:  # as it was before there were any
        del settings["lists"]
    if folder.schema.user is None:  # as it was before there were event logs
        for name in ("user", "context", "actions"):
            del schema[name], settings[name]
    parts = {
        "schema": schema,
        "settings": settings,
        "constants": manifest.constants,
        "vocabulary": folder.vocabulary_digests,
        "forms": manifest.forms,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def save_encoding(folder: ShardFolder, target: pathlib.Path) -> None:
    """Copies the encoding of a folder of shards to a new folder, in one step.

    Raises:
        ValueError: if the target exists already or cannot be written.
    """
    manifest = folder.manifest
    with new_folder(target, "--workdir") as partial:
        writer = ShardWriter(partial)
        for name, entry in manifest.files.items():
            if name.startswith("vocabulary"):
                writer.copy(folder.path / name, entry)
        entries = {"forms": manifest.forms, "constants": manifest.constants}
        writer.finish(folder.schema, manifest.config, **entries)


def open_encoding(path: pathlib.Path, digest: str) -> ShardFolder:
    """Returns the folder that `save_encoding` wrote, after comparing all digests.

    Args:
        digest: the encoding's digest, as a checkpoint names it.

    Raises:
        ValueError: if it is missing, damaged, or another encoding.
    """
    reason = "it is not the one that the checkpoint was trained with"
    try:
        folder = open_shards(path, verify=True)
        if digest_of(folder) == digest:
            return folder
    except Unusable as error:
        reason = error.reason
    raise ValueError(
        f"{path}, the encoding of the run, cannot be used ({reason}): restore it from "
        "a copy, or train again."
    )


def load_encoding(folder: ShardFolder) -> Encoding:
    """Returns the encoding of a folder of shards.

    Raises:
        ValueError: if its vocabularies are not what conversions write.
    """
    return Encoding(
        config=folder.manifest.config,
        encoders=tuple(_encoders(folder)),
        slots=folder.schema.slots,
        forms=folder.manifest.forms,
        constants=folder.manifest.constants,
    )


def values_of(
    folder: ShardFolder, ids: Mapping[str, Sequence[int]]
) -> dict[str, list[str | None]]:
    """Returns the values that have these ids, by column.

    One vocabulary is in memory at a time.

    Returns:
        for each id its value; None where many values share it: id 0, and hashes.
    """
    by_column = {}
    for column, encoder in zip(folder.schema.fields, _encoders(folder), strict=True):
        has_values = isinstance(encoder, VocabularyEncoder | Input)
        values = encoder.values if has_values else ()
        by_column[column] = [
            str(values[i - 1]) if 1 <= i <= len(values) else None
            for i in ids.get(column, ())
        ]
    return by_column


def _encoders(folder: ShardFolder) -> Iterator[Encoder]:
    schema, config = folder.schema, folder.manifest.config
    parts = config.inputs.bound(folder.manifest.constants).parts
    for column, rows in zip(schema.fields, schema.vocab_sizes, strict=True):
        if (part := parts.get(column)) is not None:
            if part.rows != rows:
                raise Unusable(folder.path, f"{column!r} has not {part.rows} rows")
            yield part
            continue
        owner = config.owners.get(column, column)
        if (hashes := hash_encoder(config, owner)) is not None:
            if hashes.rows != rows:
                raise Unusable(folder.path, f"{column!r} has not {hashes.rows} rows")
            yield hashes
            continue
        values = _values(folder.path / vocabulary_name(schema.fields.index(owner)))
        if (reserved := rows - 1 - len(values)) < 0:
            raise Unusable(folder.path, f"{column!r} has more values than rows")
        yield VocabularyEncoder(values, reserved)


def _values(path: pathlib.Path) -> pa.Array:
    try:
        values = parquet.read_table(path, page_checksum_verification=True)["value"]
        return values.combine_chunks().cast(pa.large_string())
    except (pa.ArrowException, KeyError, OSError) as error:
        raise Unusable(path, f"it is no vocabulary: {str(error)[:80]}") from None
