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


def features(rows, known, l2):
    """Returns standardized dense columns, one-hot ids, and the mean of lists' ids.

    The L2 of dense columns is 1 where that of all is `l2`.
    """
    x = rows["dense"][:, :1]
    mean, std = known["dense"][:, 0].mean(), known["dense"][:, 0].std()
    tags = np.stack([(rows["bag_0"] == i).sum(1) for i in range(6)], axis=1)
    tags = tags / np.maximum(tags.sum(1, keepdims=True), 1)
    hot = [np.eye(n)[rows["ids"][:, i]] for i, n in enumerate((20, 8))]
    x = np.sqrt(l2) * (x - mean) / std
    return sparse.csr_matrix(np.hstack([x, *hot, tags]))


@pytest.mark.parametrize("l2", [100.0, 1.0])
def test_they_are_those_of_scikit_learn(monkeypatch, l2):
    monkeypatch.setattr(baselines, "_L2", (l2,))
    monkeypatch.setattr(baselines, "_ROUNDS", 0)
    monkeypatch.setattr(baselines, "_BLOCK", 300)  # several, the last not full
    train, valid, test = records(2000), records(400, 1), records(1000, 2)
    found = baseline_ne(dataset(train), dataset(valid), dataset(test))

    mean = np.average(train["label"], weights=train["weight"])
    assert found["mean"] == pytest.approx(ne(test, np.full(1000, mean)), abs=1e-9)
    oracle = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=1000)
    x, others = (features(rows, train, l2) for rows in (train, test))
    oracle.fit(x, train["label"], sample_weight=train["weight"])
    p = oracle.predict_proba(others)[:, 1]
    assert found["logistic_regression"] == pytest.approx(ne(test, p), abs=2e-4)


def test_l2_is_that_of_the_lowest_loss_on_validation_rows(monkeypatch):
    train, valid = dataset(records(60)), dataset(records(400, 1))
    monkeypatch.setattr(baselines, "_ROUNDS", 0)

    def with_l2(*values):
        monkeypatch.setattr(baselines, "_L2", values)
        return baseline_ne(train, valid, valid)["logistic_regression"]

    single = [with_l2(l2) for l2 in (1e4, 10.0, 1e-4)]
    assert single[1] < min(single[0], single[2])
    assert with_l2(1e4, 10.0, 1e-4) == pytest.approx(single[1], abs=1e-3)


LARGE, SMALL = 2.0, 0.5  # deviations of the weights of two columns of 200 values


def drawn(n, seed, schema):
    """Returns rows of two columns whose weights are drawn, and the true logits."""
    draw, fixed = np.random.default_rng(seed), np.random.default_rng(5)
    rows = np.zeros(n, record_dtype_of(schema))
    rows["ids"] = draw.integers(1, 201, (n, 2))
    rows["dense"] = draw.normal(size=(n, 1))
    weights = fixed.normal(0, (LARGE, SMALL), (201, 2))
    logit = weights[rows["ids"], [0, 1]].sum(axis=1) - 1.0
    rows["label"] = draw.random(n) < 1 / (1 + np.exp(-logit))
    return rows, logit


def test_fields_have_the_l2_of_the_largest_evidence(monkeypatch):
    schema = Schema(
        label="click", dense=("x",), categorical=("a", "b"), vocab_sizes=(201, 201)
    )
    (train, _), (valid, _), (test, _) = (
        drawn(n, i, schema) for i, n in enumerate((6000, 1000, 20_000))
    )
    parts = [dataset(rows, schema) for rows in (train, valid, test)]
    fit = baselines._Fit(baselines.sample(parts[0], 6000), 0, baselines._spec(parts[0]))
    l2 = np.full(2, 10.0)
    for _ in range(12):
        fit.at(l2)
        l2 = fit.of_evidence(l2)
    # A variance of 200 weights is known to sqrt(2 / 200) = 10 %, but those of 30 rows
    # have errors as large as the small one, of which the diagonal tells less.
    assert 1 / l2[0] == pytest.approx(LARGE**2, rel=0.4)
    assert 1 / l2[1] == pytest.approx(SMALL**2, rel=0.8)
    by_field = baseline_ne(*parts)["logistic_regression"]
    monkeypatch.setattr(baselines, "_ROUNDS", 0)
    assert by_field < baseline_ne(*parts)["logistic_regression"] - 0.001


def test_one_l2_is_kept_where_that_of_the_evidence_is_clearly_worse(monkeypatch):
    train, valid = dataset(records(2000)), dataset(records(400, 1))
    monkeypatch.setattr(baselines, "_ROUNDS", 0)
    kept = baseline_ne(train, valid, valid)
    monkeypatch.setattr(baselines, "_ROUNDS", 3)
    worst = lambda self, l2: np.full_like(l2, 1e6)  # noqa: E731
    monkeypatch.setattr(baselines._Fit, "of_evidence", worst)
    assert baseline_ne(train, valid, valid) == kept


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
