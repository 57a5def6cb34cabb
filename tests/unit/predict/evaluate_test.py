"""The quality of a run on labelled rows, overall and by columns."""

import numpy as np
import pytest
from sklearn import metrics

from loka_jax.predict import evaluate_files
from loka_jax.predict.evaluate import quality_of, ranking_of
from loka_jax.report.comparison import Scored
from tests.support.predict import predictor_of, write

LINES = [
    f"{i % 3 // 2},{(i * 7 % 11) / 4 - 1},u{i % 2},{3 + i % 3}\n" for i in range(60)
]
LABELS = np.array([i % 3 // 2 for i in range(60)])
LOGITS = np.array([(i * 7 % 11) / 4 - 1 for i in range(60)])  # the stand-in's: prices


def expected(labels, logits, weights):
    p = 1 / (1 + np.exp(-logits))
    loss = metrics.log_loss(labels, p, sample_weight=weights)
    q = np.average(labels, weights=weights)
    entropy = -(q * np.log(q) + (1 - q) * np.log(1 - q))
    return {
        "auc": metrics.roc_auc_score(labels, logits, sample_weight=weights),
        "logloss": loss,
        "ne": loss / entropy,
        "calibration": np.average(p, weights=weights) / q,
    }


def test_numbers_are_those_of_scikit_learn():
    weights = 0.5 + np.arange(60) % 4
    found = quality_of(LOGITS, LABELS, weights)
    for name, value in expected(LABELS, LOGITS, weights).items():
        assert found[name] == pytest.approx(value, abs=1e-9)
    assert (found["rows"], found["clicks"]) == (60, 20)


def test_intervals_are_those_of_a_mean():
    found = quality_of(LOGITS, LABELS, np.ones(60))
    losses = np.logaddexp(0, np.where(LABELS == 1, -LOGITS, LOGITS))
    half = 1.959964 * losses.std() / 60**0.5
    assert found["logloss_half"] == pytest.approx(half)
    entropy = found["logloss"] / found["ne"]
    assert found["ne_half"] == pytest.approx(half / entropy)


def test_one_kind_of_label_has_no_ne():
    found = quality_of(LOGITS, np.zeros(60), np.ones(60))
    assert found["ne"] is found["auc"] is found["calibration"] is None
    assert found["logloss"] > 0
    assert quality_of(LOGITS, LABELS, np.zeros(60))["logloss"] is None


def test_rows_of_files_are_judged_overall_and_by_columns(tmp_path):
    model, _ = predictor_of(tmp_path)
    write(tmp_path / "a.csv", LINES[:23])
    write(tmp_path / "b.csv", LINES[23:])
    paths = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
    found = evaluate_files(model, paths, by=("user", "item"))
    want = expected(LABELS, LOGITS, np.ones(60))
    for name, value in want.items():
        assert found.overall["label"][name] == pytest.approx(value, abs=1e-6)
    assert len(found.groups) == 6
    rows = np.arange(60)
    own = (rows % 2 == 1) & (rows % 3 == 2)
    group = found.groups["u1, 5"]["label"]
    assert group["rows"] == own.sum() == 10
    assert group["logloss"] == pytest.approx(
        np.logaddexp(0, np.where(LABELS == 1, -LOGITS, LOGITS))[own].mean(), abs=1e-6
    )
    some = evaluate_files(model, paths, where="user=u1").overall["label"]
    assert some["rows"] == 30
    with pytest.raises(ValueError, match="has no rows"):
        evaluate_files(model, paths, where="user=u9")


def test_each_label_is_judged_by_the_rows_that_have_it(tmp_path):
    model, _ = predictor_of(tmp_path, label="click", labels=("click", "buy"))
    lines = [f"{'' if i % 2 else i % 3 // 2}," + x for i, x in enumerate(LINES)]
    path = tmp_path / "c.csv"
    path.write_text("buy,click,price,user,item\n" + "".join(lines))
    found = evaluate_files(model, path).overall
    assert (found["click"]["rows"], found["buy"]["rows"]) == (60, 30)


def test_ranking_within_groups_is_that_of_scikit_learn():
    groups = np.arange(60) % 7
    scored = Scored(LOGITS + np.arange(60) / 1e3, LABELS.astype(float), np.ones(60))
    found = ranking_of(scored, groups, 5)
    by_group = [np.flatnonzero(groups == g) for g in range(7)]
    ndcg = [
        metrics.ndcg_score(LABELS[None, rows], scored.logits[None, rows], k=5)
        for rows in by_group
    ]
    aucs = [metrics.roc_auc_score(LABELS[r], scored.logits[r]) for r in by_group]
    assert found["ndcg"] == pytest.approx(np.mean(ndcg))
    sizes = [len(rows) for rows in by_group]
    assert found["gauc"] == pytest.approx(np.average(aucs, weights=sizes))
    none = Scored(LOGITS, np.zeros(60), np.ones(60))
    assert ranking_of(none, groups, 5) == {"gauc": None, "ndcg": None, "k": 5}


def test_intervals_hold_the_truth_in_95_of_100_samples():
    draw, held = np.random.default_rng(0), {"auc": 0, "calibration": 0}
    truth = quality_of(*sample(draw, 400_000))
    for _ in range(200):
        found = quality_of(*sample(draw, 400))
        for name in held:
            held[name] += abs(found[name] - truth[name]) <= found[f"{name}_half"]
    assert all(180 <= count <= 198 for count in held.values()), held


def sample(draw, n):
    x = draw.normal(-1, 1, n)
    return x + 0.2, (draw.random(n) < 1 / (1 + np.exp(-x))).astype(float), np.ones(n)


def test_dates_are_told_apart_by_days_and_groups_ranked(tmp_path):
    model, _ = predictor_of(tmp_path)
    lines = [
        f"{x.strip()},2026-11-0{1 + (i % 3 > 0)}T0{i % 9}:00:00\n"
        for i, x in enumerate(LINES)
    ]
    path = tmp_path / "d.csv"
    path.write_text("label,price,user,item,at\n" + "".join(lines))
    found = evaluate_files(model, path, by=("at",), within="user", k=3)
    rows = [(day, of["label"]["rows"]) for day, of in found.groups.items()]
    assert rows == [("2026-11-01", 20), ("2026-11-02", 40)]
    assert 0 < found.overall["label"]["ndcg"] < 1
    with pytest.raises(ValueError, match="--k 0 must be at least 1"):
        evaluate_files(model, path, k=0)
