"""Crosses are chosen where pairs of values say more than the values apart."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from loka_jax.data import Schema
from loka_jax.data.crosses import CrossedDataset, crosses_of
from loka_jax.data.reader import ShardDataset, record_dtype_of
from loka_jax.train import baselines
from loka_jax.train.cross_choice import choose_crosses

SCHEMA = Schema(
    label="click",
    dense=(),
    categorical=("user", "item", "noise"),
    multi=("tags",),
    vocab_sizes=(21, 9, 50, 12),
    slots=(2,),
)


def dataset(n, seed, strength):
    draw = np.random.default_rng(seed)
    rows = np.zeros(n, record_dtype_of(SCHEMA))
    rows["ids"] = draw.integers(1, (21, 9, 50), (n, 3))
    rows["bag_0"] = draw.integers(1, 12, (n, 2))
    taste = np.random.default_rng(5).normal(0, strength, (21, 9))
    liking = np.random.default_rng(6).normal(0, strength, (9, 12))
    user, item = rows["ids"][:, 0], rows["ids"][:, 1]
    logit = taste[user, item] + liking[item[:, None], rows["bag_0"]].mean(axis=1)
    rows["label"] = draw.random(n) < 1 / (1 + np.exp(-logit))
    return ShardDataset(SCHEMA, rows, "rows")


def splits(strength):
    train, valid = dataset(8000, 0, strength), dataset(3000, 1, strength)
    return cast(Any, SimpleNamespace(train=train, valid=valid, folder="here"))


def test_pairs_that_help_are_crosses_and_help_a_regression():
    said, data = [], splits(1.0)
    found = choose_crosses(data, said.append)
    assert sorted(found) == ["item*tags=89", "user*item=161"]  # a row for each pair
    names = ", ".join(x.partition("=")[0] for x in found)
    sentence = "Crosses, whose pairs of values have weights of their own:"
    assert said == [f"{sentence} {names}"]

    crosses = crosses_of(found, SCHEMA)
    test = dataset(3000, 2, 1.0)
    parts = data.train, data.valid, test
    with_them = [CrossedDataset(x, crosses) for x in parts]
    ne = [
        baselines.baseline_ne(baselines.fit_regressions(a, b), c)["logistic_regression"]
        for a, b, c in (parts, with_them)
    ]
    assert ne[0] is not None and ne[1] is not None
    assert ne[1] < ne[0] - 0.1  # 0.97 and 0.82


def test_no_pair_is_chosen_by_chance():
    said = []
    assert choose_crosses(splits(0.0), said.append) == () and not said
