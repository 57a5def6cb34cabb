"""A run trained on a small CSV file that is gone when it ends."""

import dataclasses
import pathlib
import shutil
from typing import NamedTuple

import numpy as np
import pytest

from loka_jax.data import DataConfig
from loka_jax.train import build as build_lib
from loka_jax.train import session
from tests.support import train as support

HEADER = "label,price,user,item\n"
# The scales of this recipe depend on all rows of a batch, padding included.
RECIPE = "fp8_tensorwise"


class Trained(NamedTuple):
    """A run, and what its final evaluation saw.

    Attributes:
        workdir: the folder of the run.
        test: the file of its final evaluation.
        logits: of that evaluation's rows.
        summary: the run's summary.json.
    """

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
    options = DataConfig(
        kind="table",
        path=str(folder / path),
        dense=("price",),
        categorical=("user", "item"),
        cache=str(folder / "cache"),
    )
    options = dataclasses.replace(options, **data)
    small = support.config(folder / workdir, data=options, eval_every=None, epochs=1)
    return dataclasses.replace(small, model=small.model.clone(recipe=RECIPE))


def train(folder, config) -> Trained:
    """Trains, with the logits of the last evaluation recorded."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "write_run_page", lambda path, run: path)
        auc = build_lib.metrics.auc
        patch.setattr(build_lib.metrics, "auc", lambda *x: seen.append(x) or auc(*x))
        assert support.train(config)[0] == 0
    logits, _, weights = seen[-1]
    summary = support.summary(config.run.workdir)
    return Trained(
        config.run.workdir, folder / "test.csv", logits[weights > 0], summary
    )


def train_and_lose_the_data(folder) -> Trained:
    """Trains on a CSV file, and removes it and everything made of it."""
    source = write(folder / "train.csv", rows(200))
    # Not a multiple of the batch size; some users are new.
    test = write(folder / "test.csv", rows(75, seed=1, users=14))
    trained = train(folder, config(folder, test=str(test)))
    source.unlink()
    shutil.rmtree(folder / "cache")
    return trained
