"""Encodings by hand; a run trained on a small CSV file that is gone when it ends."""

import dataclasses
import pathlib
import shutil
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from loka_jax.data import DataConfig
from loka_jax.data.config import columns_of
from loka_jax.data.encoding import VocabularyEncoder, hash_encoder
from loka_jax.data.records import Encoding
from loka_jax.predict import Predictor
from loka_jax.train.config import EmbeddingConfig
from loka_jax.train.scores import read_scores
from loka_jax.train.state import TrainState
from tests.support import train as support

HEADER = "label,price,user,item\n"
# The scales of this recipe depend on all rows of a batch, padding included.
RECIPE = "fp8_tensorwise"


VALUES = {"user": ["u1", "é", "NA"], "item": ["7", "3", "1099511627776"]}


def encoding_of(config, **options) -> Encoding:
    """Returns an encoding with small vocabularies, no two of which have one size."""

    def encoder(column):
        words = pa.array(VALUES.get(column, ["a", "x"]), pa.large_string())
        vocabulary = VocabularyEncoder(words, reserved=3 + len(column))
        return hash_encoder(config, column) or vocabulary

    scaled = {"price": (0.25, 1.7), "age": (-3.0, 0.3)}
    constants = scaled | {"age:buckets": (0.0, 7.25, 12.0)}
    parts = config.inputs.bound(constants).parts
    fields = columns_of(config).fields
    return Encoding(
        config=config,
        encoders=tuple(
            parts.get(f) or encoder(config.owners.get(f, f)) for f in fields
        ),
        constants=constants,
        **options,
    )


class Trained(NamedTuple):
    """The folder of a run, its summary, and file and logits of its final evaluation."""

    workdir: pathlib.Path
    test: pathlib.Path
    logits: np.ndarray
    summary: dict


def rows(count, *, seed=0, users=12):
    """Returns lines of a table whose label depends on its columns."""
    draw = np.random.default_rng(seed)
    user, item = draw.integers(0, users, count), draw.integers(0, 9, count)
    price = draw.lognormal(size=count)
    label = draw.random(count) < 1 / (1 + np.exp(1 + item / 3 - user / 4))
    columns = zip(label.astype(int), price, user, item, strict=True)
    return [f"{y},{p:.4f},u{u},{i}\n" for y, p, u, i in columns]


def write(path, lines):
    path.write_text(HEADER + "".join(lines))
    return path


def config(folder, *, path="train.csv", workdir="run", **data):
    """Returns a run of a few steps on a file of `folder`."""
    columns = dict(dense=("price",), categorical=("user", "item"))
    paths = dict(path=str(folder / path), cache=str(folder / "cache"))
    options = DataConfig(**{"kind": "table", **columns, **paths, **data})
    small = support.config(folder / workdir, data=options, eval_every=None, epochs=1)
    return dataclasses.replace(small, model=small.model.clone(recipe=RECIPE))


def predictor_of(folder, **data):
    """Returns a predictor whose logits are prices, and the batches that it ran.

    Of two labels, those of the second are prices with the other sign, less 1.
    """
    run = config(folder, transform=("none",), **data)
    run = dataclasses.replace(run, loop=dataclasses.replace(run.loop, batch_size=4))
    batches, tasks = [], data.get("labels", ("label",))
    state = object.__new__(TrainState)  # nothing reads it

    def step(given, seen, batch):
        assert given is state
        batches.append(batch)
        logits = batch.dense[:, 0]
        both = np.stack([logits, -logits - 1], axis=1)
        return seen, logits if len(tasks) == 1 else both

    encoding = encoding_of(run.data)
    return Predictor(run, encoding, 3, state, step), batches


def sigmoid(x):
    """Returns float32 probabilities, computed in float64."""
    return (1 / (1 + np.exp(-np.asarray(x, np.float64)))).astype(np.float32)


def train(config) -> Trained:
    """Trains, to scores of all rows of the test file."""
    assert support.train(config)[0] == 0
    (scored,) = read_scores(config.run.workdir).values()
    test, summary = pathlib.Path(config.data.test), support.summary(config.run.workdir)
    return Trained(config.run.workdir, test, scored.logits, summary)


def write_both(folder) -> str:
    """Writes a file to train on and one to test on, whose path it returns."""
    write(folder / "train.csv", rows(200))
    # Not a multiple of the batch size; some users are new.
    return str(write(folder / "test.csv", rows(75, seed=1, users=14)))


def train_and_lose_the_data(folder) -> Trained:
    """Trains on a CSV file, and removes it and everything made of it."""
    run = train(config(folder, test=write_both(folder)))
    (folder / "train.csv").unlink()
    shutil.rmtree(folder / "cache")
    return run


LISTS = {
    "multi": ("tags", "genres"),
    "multi_weights": ("tags=strengths",),
    "weight": "importance",
    "transform": ("price=log1p,clip:0.1:2,standardize,missing,buckets:5",)
    + ("at=hour,weekday",),
}


def lists(count, *, seed=0, values=9):
    """Returns rows with lists of 0 to 4 values, some of them missing, and weights."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, 5, count)
    tags = [[f"t{t}" for t in draw.integers(0, values, n)] for n in lengths]
    genres = [None if len(t) == 1 else [x[1:] for x in t[::-1]] for t in tags]
    user = draw.integers(0, 12, count)
    clicked = draw.random(count) < 1 / (1 + np.exp(1 + user / 6 - lengths))
    return pa.table(
        {
            "label": clicked.astype(int),
            "importance": draw.uniform(0.5, 4, count),
            "price": pa.array(draw.lognormal(size=count), mask=lengths == 2),
            "at": pa.array(
                draw.integers(0, 2**51, count), pa.timestamp("us"), lengths == 3
            ),
            "user": [f"u{i}" for i in user],
            "item": draw.integers(0, 9, count),
            "tags": tags,
            "genres": genres,
            "strengths": [list(draw.random(len(t))) for t in tags],
        }
    )


def train_on_lists(folder) -> Trained:
    """Trains on lists, parts of columns and crosses in bfloat16.

    Its evaluation saw `test.parquet`.
    """
    parquet.write_table(lists(200), folder / "train.parquet")
    # Not a multiple of the batch size; some tags are new.
    test = folder / "test.parquet"
    parquet.write_table(lists(75, seed=1, values=12), test)
    run = config(folder, path="train.parquet", test=str(test), **LISTS)
    crosses = ("user*item=109", "tags*user=64")  # each pair its row, and hashed
    options = dict(pooling=("genres=sum",), dtype="bf16", crosses=crosses)
    tables = EmbeddingConfig(dim=16, **options)
    return train(dataclasses.replace(run, embedding=tables))
