"""What tells one data set from another: the rows and ids that training sees.

An identity is a small dict of JSON values with one part for the schema, the
vocabularies and each split, so that two of them can be compared part by part. It
depends on what the data hold, not on paths or times.
"""

import hashlib
from dataclasses import fields

from loka_jax.data import generated
from loka_jax.data.batch import Schema
from loka_jax.data.config import DataConfig
from loka_jax.data.shards import SPLITS, ShardFolder

# The options that decide which examples are generated; the table sizes stand in the
# schema.
_GENERATED = ("world", "zipf", "latent_dim", "signal", "click_rate")


def identity_of_shards(folder: ShardFolder) -> dict:
    """Returns the identity of converted data.

    Its parts are `source`, `schema`, `vocabulary` (a digest for each field with one)
    and the splits: the number of rows and a digest of all shards, or None.
    """
    splits = {
        split: {
            "rows": sum(len(records) for records in folder.shards[split]),
            "digest": _digest(folder.digests[split]),
        }
        if folder.shards[split]
        else None
        for split in SPLITS
    }
    return {
        "source": "files",
        "schema": _schema(folder.schema),
        "vocabulary": folder.vocabulary_digests,
        **splits,
    }


def identity_of_generated(config: DataConfig, seed: int) -> dict:
    """Returns the identity of generated data.

    Its parts are `source`, `schema`, `model` (the options of the planted model) and
    the splits: the number of rows and the seed that draws them.
    """
    sizes = generated.split_sizes(config)
    splits = {split: {"rows": rows, "seed": seed} for split, rows in sizes.items()}
    return {
        "source": "generated",
        "schema": _schema(generated.schema_of(config)),
        "model": {name: getattr(config, name) for name in _GENERATED},
        **splits,
    }


def _schema(schema: Schema) -> dict:
    # What data have by default is left out, so that it can be added to a schema.
    parts = {
        field.name: value
        for field in fields(schema)
        if (value := getattr(schema, field.name)) != field.default
    }
    return {k: list(v) if isinstance(v, tuple) else v for k, v in parts.items()}


def _digest(digests: list[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
