import numpy as np
import pytest
import scipy.stats

from loka_jax.report import comparison as lib
from loka_jax.report.comparison import ComparedRun, Scored, by_examples
from tests.support.report import RUN, scored


def files(evals=(), final=None, seed=0, split="test", **config):
    summary = {"final_eval": final or {}, "final_split": split}
    return RUN._replace(summary=summary, config={"seed": seed} | config, evals=[*evals])


def losses(scored):
    p = 1 / (1 + np.exp(-scored.logits.astype(np.float64)))
    return -np.log(np.where(scored.labels == 1, p, 1 - p))


def test_differences_over_examples_are_those_of_a_paired_t_test_and_of_delong():
    one, two = scored(1), scored(2)
    found = by_examples(one, two)
    expected = scipy.stats.ttest_rel(losses(two), losses(one)).confidence_interval()
    logloss = found["logloss"]
    assert logloss.count == 3000
    interval = logloss.mean - logloss.half, logloss.mean + logloss.half
    assert interval == pytest.approx(tuple(expected), rel=1e-3)
    percent = 100 * (losses(two).mean() / losses(one).mean() - 1)
    assert found["ne_delta_pct"].mean == pytest.approx(percent)
    clicked, wins = one.labels == 1, []
    for x in (one, two):  # of each click over each other
        over = x.logits[clicked][:, None] - x.logits[~clicked]
        wins.append((np.sign(over) + 1) / 2)
    won = wins[1] - wins[0]
    parts = [won.mean(axis=axis) for axis in (1, 0)]
    variance = sum(part.var(ddof=1) / len(part) for part in parts)
    assert found["auc"].mean == pytest.approx(won.mean(), abs=1e-9)
    assert found["auc"].half == pytest.approx(1.959964 * variance**0.5)


def test_a_weight_counts_like_as_many_examples():
    twice = np.where(np.arange(3000) % 3, 1.0, 2.0)
    rows = np.repeat(np.arange(3000), twice.astype(int))
    weighted = by_examples(*[scored(seed, weights=twice) for seed in (1, 2)])
    repeated = [Scored(*(x[rows] for x in scored(seed))) for seed in (1, 2)]
    expected = by_examples(*repeated)["logloss"].mean
    assert "auc" not in weighted
    assert weighted["logloss"].mean == pytest.approx(expected)


def test_scores_of_other_examples_are_not_paired():
    one, two = scored(1), scored(2)
    for other in (
        two._replace(labels=1 - two.labels),
        two._replace(weights=2 * two.weights),
        Scored(*(x[:-1] for x in two)),
    ):
        assert by_examples(one, other) is None
    assert by_examples(*[Scored(*(x[:0] for x in one))] * 2) is None


def line(step, ne, split="valid"):
    return {"step": step, "split": split, "ne": ne, "auc": None}


def test_evaluations_are_paired_by_step_and_split():
    base = files(evals=[line(10, 0.9), line(20, 0.8), line(30, 0.7, "test")])
    other = files(evals=[line(20, 0.7), line(10, 0.86), line(30, 0.5), line("x", 1)])
    assert [a["step"] for a, _ in lib.common_steps(base, other)] == [20, 10]


def test_runs_are_paired_by_seed_within_groups():
    nes = {
        "bf16": {0: 0.80, 1: 0.82, 2: 0.84},
        "fp8": {2: 0.85, 1: 0.82, 0: 0.83, 7: 9},
    }
    runs = [
        ComparedRun("", files(seed=seed, recipe=recipe, final={"ne": ne}), {})
        for recipe, of in nes.items()
        for seed, ne in of.items()
    ]
    base, other = lib.seed_groups(runs)
    assert (base, other) == (runs[:3], runs[3:])
    mean, half, count = lib.by_seeds(base, other)["ne"]
    minus = [0.03, 0.0, 0.01]
    assert (mean, count) == (pytest.approx(np.mean(minus)), 3)
    assert half == pytest.approx(4.3027 * np.std(minus, ddof=1) / 3**0.5, rel=1e-4)


def test_runs_on_other_data_are_not_comparable():
    def ended(split="test", count=50, **data):
        found = files(data={"kind": "table"} | data, final={"ne": 0.9}, split=split)
        found.summary["data"] = {"examples": {"test": count, "valid": 40}}
        return found

    base = ended(label="click")
    for options, why in (
        ({}, None),
        ({"count": 40}, "they were evaluated on 50 and 40 examples"),
        ({"label": "buy"}, "data.label is click and buy"),
        ({"kind": "criteo"}, "data.kind is table and criteo"),
        ({"split": "valid"}, "one was evaluated on test, the other on valid"),
    ):
        other = ended(**{"label": "click"} | options)
        runs = [lib.ComparedRun(name, x, {}) for name, x in (("a", base), ("b", other))]
        assert lib.why_not_comparable(*runs) == why
        again = [run._replace(again="day.parquet") for run in runs]
        assert lib.why_not_comparable(*again) is None
