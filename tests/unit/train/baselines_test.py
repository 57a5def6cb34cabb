"""The NE of the mean and of a logistic regression beside that of a model."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.linear_model import LogisticRegression

from loka_jax.data import Schema
from loka_jax.data.reader import ShardDataset, record_dtype_of
from loka_jax.train import baselines, summary

SCHEMA = Schema(
    label="click",
    dense=("x", "constant"),
    categorical=("user", "item"),
    multi=("tags",),
    vocab_sizes=(20, 8, 6),
    slots=(3,),
    weighted=True,
)


def records(n, seed=0, schema=SCHEMA):
    """Returns rows whose clicks follow a linear model, lists of 0 to 3 values."""
    draw = np.random.default_rng(seed)
    rows = np.zeros(n, record_dtype_of(schema))
    rows["dense"] = np.stack([draw.normal(3, 2, n), np.full(n, 7.0)], axis=1)
    rows["ids"] = draw.integers(0, (20, 8), (n, 2))
    tags = draw.integers(0, 6, (n, 3))
    rows["bag_0"] = np.where(np.arange(3) < draw.integers(0, 4, (n, 1)), tags, -1)
    rows["weight"] = draw.choice([0.5, 2.0], n)
    user = np.random.default_rng(9).normal(0, 1, 20)
    logit = rows["dense"][:, 0] / 2 - 2 + user[rows["ids"][:, 0]]
    clicks = draw.random(n) < 1 / (1 + np.exp(-logit))
    rows["label"] = clicks if len(schema.labels) == 1 else clicks[:, None]
    return rows


def dataset(rows, schema=SCHEMA):
    return ShardDataset(schema, rows, "rows")


def baseline_ne(train, valid, test):
    return baselines.baseline_ne(baselines.fit_regressions(train, valid), test)


def ne(rows, p):
    y, w = rows["label"], rows["weight"]
    loss = np.average(-(y * np.log(p) + (1 - y) * np.log(1 - p)), weights=w)
    q = np.average(y, weights=w)
    return loss / -(q * np.log(q) + (1 - q) * np.log(1 - q))


def features(rows, known):
    """Returns standardized dense columns, one-hot ids, and the mean of lists' ids."""
    x = rows["dense"][:, :1]
    mean, std = known["dense"][:, 0].mean(), known["dense"][:, 0].std()
    tags = np.stack([(rows["bag_0"] == i).sum(1) for i in range(6)], axis=1)
    tags = tags / np.maximum(tags.sum(1, keepdims=True), 1)
    hot = [np.eye(n)[rows["ids"][:, i]] for i, n in enumerate((20, 8))]
    return sparse.csr_matrix(np.hstack([np.clip((x - mean) / std, -5, 5), *hot, tags]))


@pytest.mark.parametrize("l2", [100.0, 1.0])
def test_they_are_those_of_scikit_learn(monkeypatch, l2):
    monkeypatch.setattr(baselines, "_L2", (l2,))
    monkeypatch.setattr(baselines, "_BLOCK", 300)  # several, the last not full
    train, valid, test = records(2000), records(400, 1), records(1000, 2)
    found = baseline_ne(dataset(train), dataset(valid), dataset(test))

    mean = np.average(train["label"], weights=train["weight"])
    assert found["mean"] == pytest.approx(ne(test, np.full(1000, mean)), abs=1e-9)
    oracle = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=1000)
    oracle.fit(features(train, train), train["label"], sample_weight=train["weight"])
    p = oracle.predict_proba(features(test, train))[:, 1]
    assert found["logistic_regression"] == pytest.approx(ne(test, p), abs=2e-4)


def test_l2_is_that_of_the_lowest_loss_on_validation_rows(monkeypatch):
    train, valid = dataset(records(60)), dataset(records(400, 1))

    def with_l2(*values):
        monkeypatch.setattr(baselines, "_L2", values)
        return baseline_ne(train, valid, valid)["logistic_regression"]

    single = [with_l2(l2) for l2 in (1e4, 10.0, 1e-4)]
    assert single[1] < min(single[0], single[2])
    assert with_l2(1e4, 10.0, 1e-4) == pytest.approx(single[1], abs=1e-3)


def test_a_task_counts_the_rows_that_have_its_label():
    schema = Schema(**{**vars(SCHEMA), "further_labels": ("buy",)})
    both, one = records(500, schema=schema), records(500)
    both["label"][:, 1] = np.where(np.arange(500) % 2, np.nan, both["label"][:, 0])
    found = baseline_ne(*[dataset(both, schema)] * 3)
    parts = [baseline_ne(*[dataset(x)] * 3) for x in (one, one[::2].copy())]
    for name, value in found.items():
        assert value == pytest.approx(np.mean([x[name] for x in parts]), abs=5e-3)


def test_one_kind_of_label_has_no_ne():
    rows = records(100)
    rows["label"] = 0
    assert set(baseline_ne(*[dataset(rows)] * 3).values()) == {None}


@pytest.mark.parametrize("ne, loses", [(0.91, True), (0.9, False), (np.nan, True)])
def test_a_model_that_loses_is_said(ne, loses):
    known = {"mean": 1.0, "logistic_regression": 0.9}
    lines = summary.beside(ne, known)
    assert "mean 1.00000" in lines[0] and "columns 0.90000" in lines[0]
    assert len(lines) == 1 + loses and ("loses" in lines[-1]) == loses
    assert summary.beside(ne, None) == summary.beside(ne, dict.fromkeys(known)) == []
