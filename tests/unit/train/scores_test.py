import numpy as np
import pytest
from sklearn import metrics as oracle

from loka_jax.train.scores import Scores, breakdown, by_value, wilson


def scores(num=4000):
    """Returns scores of which some are equal."""
    rng = np.random.default_rng(0)
    logits = rng.normal(-1, 1.5, num).round(1).astype(np.float32)
    labels = rng.random(num) < 1 / (1 + np.exp(-logits))
    ids = np.stack([rng.integers(0, 9, num), rng.geometric(0.3, num)], 1)
    weights = rng.choice([1.0, 0.5, 3.0], num)
    return Scores(
        logits, labels.astype(np.float32), weights.astype(np.float32), ids.astype("i4")
    )


@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_auc_of_each_value_is_that_of_scikit_learn(is_weighted):
    found = scores()
    found = found._replace(weights=found.weights ** np.float32(is_weighted))
    columns = breakdown(found, ("a", "b"))["columns"]
    for field, column in enumerate(columns):
        ids = found.ids[:, field]
        values, counts = np.unique(ids, return_counts=True)
        aucs, sizes = {}, {}
        for value in values:
            x, y, w = (part[ids == value] for part in found[:3])
            if 0 < y.mean() < 1:
                aucs[value] = oracle.roc_auc_score(y, x, sample_weight=w)
                sizes[value] = w.sum()
        mean = np.average([*aucs.values()], weights=[*sizes.values()])
        assert column["auc_within"] == pytest.approx(mean)
        covered = sum(sizes.values()) / found.weights.sum()
        assert column["covered"] == pytest.approx(covered)
        assert column["num_values"] == len(values)
        frequent = [value["count"] for value in column["values"]]
        assert frequent == sorted(counts)[::-1][: len(frequent)]
        first = column["values"][0]
        assert first["auc"] == pytest.approx(aucs[first["id"]])


def test_examples_without_the_label_count_nowhere():
    found = scores()
    missing = found._replace(labels=np.where(found.ids[:, 0] < 3, np.nan, found.labels))
    known = Scores(*(part[found.ids[:, 0] >= 3] for part in found))
    assert breakdown(missing, ("a", "b")) == breakdown(known, ("a", "b"))
    without = breakdown(found._replace(labels=found.labels * np.nan), ("a", "b"))
    assert without["examples"] == 0 and without["calibration_curve"] == []


def test_the_numbers_of_a_value_are_weighted():
    found = Scores(
        logits=np.float32([-2, -1, 0, 1, 2, 3]),
        labels=np.float32([0, 1, 0, 1, 1, 1]),
        weights=np.float32([1, 2, 1, 4, 1, 3]),
        ids=np.array([[7, 7, 7, 7, 9, 9]], np.int32).T,
    )
    column = by_value(found, 0)
    first, second = column["values"]
    # Pairs of a weight of 2 are in the wrong order; one label alone has no AUC.
    assert (first["auc"], second["auc"]) == (pytest.approx(10 / 12), None)
    assert column["auc_within"] == first["auc"]
    assert column["covered"] == pytest.approx(8 / 12)
    assert (first["count"], second["count"]) == (4, 2)
    mean = np.average(1 / (1 + np.exp([2, 1, 0, -1])), weights=[1, 2, 1, 4])
    low, high = wilson(6 / 8, 8**2 / (1 + 4 + 1 + 16))
    rates = dict(mean_prediction=mean, mean_label=0.75, calibration=mean / 0.75)
    rates |= dict(mean_label_low=low, mean_label_high=high)
    rates |= dict(calibration_low=mean / high, calibration_high=mean / low)
    assert {name: first[name] for name in rates} == pytest.approx(rates)


def test_the_interval_of_a_rate_is_that_of_wilson():
    # Newcombe (1998), table I: 81 of 263, and 0 of 20.
    assert wilson(81 / 263, 263.0) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0.0, 20.0) == pytest.approx((0.0, 0.1611), abs=1e-4)
