"""Builds runs without their data: only the schema and the number of rows are known."""

import dataclasses
from typing import NamedTuple

from loka_jax.data import DataConfig, Schema, Splits, generated
from loka_jax.data.open import identity_of_generated
from loka_jax.train import build as build_lib


class Rows(NamedTuple):
    """Stands for rows that nobody reads."""

    schema: Schema
    num_examples: int

    def num_batches(self, batch_size: int) -> int:
        return -(-self.num_examples // batch_size)


def splits_of(config: DataConfig) -> Splits:
    """Returns the splits of generated data, none of which can be read."""
    rows = Rows(generated.schema_of(config), config.examples)
    valid = rows._replace(num_examples=config.eval_examples)
    identity = identity_of_generated(config, seed=0)
    return Splits(train=rows, valid=valid, test=valid, report={}, identity=identity)


def patch_build(monkeypatch, **schema):
    """Lets `build` open no data; `schema` replaces parts of the schema."""

    def open_data(data, *, seed, base):
        splits = splits_of(data)
        changed = dataclasses.replace(splits.train.schema, **schema)
        return dataclasses.replace(splits, train=splits.train._replace(schema=changed))

    monkeypatch.setattr(build_lib, "open_data", open_data)
