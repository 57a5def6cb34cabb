import numpy as np
import pytest
from sklearn import metrics as oracle

from loka_jax.train.logs.breakdown import (
    Scores,
    breakdown,
    by_logit,
    by_value,
    calibration_curve,
    wilson,
)


def scores(num=4000, *, shift=0.0, seed=0, decimals=1):
    """Returns scores whose labels were drawn with logits moved by `shift`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 1.5, num).round(decimals).astype(np.float32)
    labels = rng.random(num) < 1 / (1 + np.exp(-(logits + shift)))
    ids = np.stack([rng.integers(0, 9, num), rng.geometric(0.3, num)], 1)
    weights = rng.choice([1.0, 0.5, 3.0], num)
    return Scores(
        logits, labels.astype(np.float32), weights.astype(np.float32), ids.astype("i4")
    )


def equally_weighted(scores):
    return scores._replace(weights=np.ones_like(scores.weights))


@pytest.mark.parametrize("weigh", [equally_weighted, lambda scores: scores])
def test_the_auc_of_each_value_is_that_of_scikit_learn(weigh):
    found = weigh(scores())
    columns = breakdown(found, ("a", "b"))["columns"]
    for field, column in enumerate(columns):
        ids = found.ids[:, field]
        aucs, sizes = [], []
        for value in np.unique(ids):
            x, y, w = (part[ids == value] for part in found[:3])
            if 0 < y.mean() < 1:
                aucs.append(oracle.roc_auc_score(y, x, sample_weight=w))
                sizes.append(w.sum())
        assert column["auc_within"] == pytest.approx(np.average(aucs, weights=sizes))
        assert column["covered"] == pytest.approx(sum(sizes) / found.weights.sum())
        assert column["num_values"] == len(np.unique(ids))
        first = column["values"][0]
        x, y, w = (part[ids == first["id"]] for part in found[:3])
        expected = oracle.roc_auc_score(y, x, sample_weight=w)
        assert first["auc"] == pytest.approx(expected)


def test_examples_without_the_label_count_nowhere():
    found = scores()
    missing = found._replace(labels=np.where(found.ids[:, 0] < 3, np.nan, found.labels))
    known = Scores(*(part[found.ids[:, 0] >= 3] for part in found))
    assert breakdown(missing, ("a", "b")) == breakdown(known, ("a", "b"))
    without = breakdown(found._replace(labels=found.labels * np.nan), ("a", "b"))
    assert without["examples"] == 0 and without["calibration_curve"] == []


def test_the_most_frequent_values_come_first():
    values = by_value(by_logit(scores()), 1)["values"]
    assert [value["id"] for value in values] == [1, 2, 3, 4, 5]  # geometric
    assert [value["count"] for value in values] == sorted(
        (value["count"] for value in values), reverse=True
    )


def test_predictions_of_logits_of_any_size_are_summed():
    found = scores(4)._replace(logits=np.float32([-1e6, -30, 0, 1e6]))
    curve = calibration_curve(equally_weighted(found), bins=4)
    expected = [0.0, np.exp(-30.0), 0.5, 1.0]
    means = [row["mean_prediction"] for row in curve]
    assert means == pytest.approx(expected, rel=1e-9, abs=0)


def test_a_value_with_one_label_has_no_auc():
    found = Scores(
        logits=np.arange(6, dtype=np.float32),
        labels=np.array([0, 1, 0, 1, 1, 1], np.float32),
        weights=np.ones(6, np.float32),
        ids=np.array([[7, 7, 7, 7, 9, 9]], np.int32).T,
    )
    column = by_value(found, 0)
    assert [value["auc"] for value in column["values"]] == [0.75, None]
    assert column["auc_within"] == 0.75 and column["covered"] == pytest.approx(2 / 3)


def test_bins_of_a_calibrated_model_cover_its_labels_and_all_examples():
    found = scores(60_000, decimals=6)
    curve = calibration_curve(by_logit(equally_weighted(found)), bins=20)
    assert [row["count"] for row in curve] == [3000] * 20
    inside = [
        row["mean_label_low"] < row["mean_prediction"] < row["mean_label_high"]
        for row in curve
    ]
    assert sum(inside) >= 17  # 95 % of 20, give or take two


def test_bins_of_a_model_that_is_off_show_by_how_much():
    for row in calibration_curve(by_logit(scores(60_000, shift=1.0))):
        assert row["mean_prediction"] < row["mean_label_low"]
        assert row["calibration"] < 1 and row["calibration_high"] < 1


def test_equal_predictions_share_a_bin():
    found = scores(100)._replace(logits=np.zeros(100, np.float32))
    (only,) = calibration_curve(found)
    assert only["count"] == 100 and only["mean_prediction"] == 0.5


def test_the_interval_of_a_rate_is_that_of_wilson():
    # Newcombe (1998), table I: 81 of 263, and 0 of 20.
    assert wilson(81 / 263, 263.0) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0.0, 20.0) == pytest.approx((0.0, 0.1611), abs=1e-4)
