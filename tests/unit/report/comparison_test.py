import numpy as np
import pytest
import scipy.stats
from sklearn import metrics as oracle

from loka_jax.report import ComparedRun, RunFiles, Scored
from loka_jax.report.comparison import (
    by_examples,
    by_seeds,
    by_steps,
    common_steps,
    seed_groups,
    why_not_comparable,
)


def files(evals=(), final=None, seed=0, split="test", **config):
    return RunFiles(
        summary={"final_eval": final or {}, "final_split": split},
        config={"seed": seed} | config,
        train=[],
        evals=list(evals),
        sites=[],
        scales=[],
        evaluation={},
        notes=[],
    )


def run(name="a", **options):
    return ComparedRun(name, files(**options), {})


def scored(seed, num=3000, weights=None):
    """Returns scores of the same examples for every seed, with noise of the seed."""
    rng, noise = np.random.default_rng(0), np.random.default_rng(100 + seed)
    true = rng.normal(-1, 1, num)
    labels = rng.random(num) < 1 / (1 + np.exp(-true))
    logits = (true + noise.normal(0, 0.5, num)).round(1)
    weights = np.ones(num) if weights is None else weights
    return Scored(*(x.astype(np.float32) for x in (logits, labels, weights)))


def losses(scored):
    p = 1 / (1 + np.exp(-scored.logits.astype(np.float64)))
    return -np.log(np.where(scored.labels == 1, p, 1 - p))


def test_differences_over_examples_are_those_of_a_paired_t_test():
    one, two = scored(1), scored(2)
    found = by_examples(one, two)
    assert found is not None
    expected = scipy.stats.ttest_rel(losses(two), losses(one)).confidence_interval()
    logloss = found["logloss"]
    assert logloss.half is not None and logloss.count == 3000
    interval = logloss.mean - logloss.half, logloss.mean + logloss.half
    assert interval == pytest.approx(tuple(expected), rel=1e-3)
    percent = 100 * (losses(two).mean() / losses(one).mean() - 1)
    assert found["ne_delta_pct"].mean == pytest.approx(percent)
    aucs = [oracle.roc_auc_score(x.labels, x.logits) for x in (one, two)]
    assert found["auc"].mean == pytest.approx(aucs[1] - aucs[0], abs=1e-9)


def test_the_interval_of_the_auc_is_that_of_resampled_examples():
    one, two = scored(1, 1000), scored(2, 1000)
    found = by_examples(one, two)
    rng, minus = np.random.default_rng(5), []
    for _ in range(400):
        rows = rng.integers(0, 1000, 1000)
        aucs = [
            oracle.roc_auc_score(x.labels[rows], x.logits[rows]) for x in (one, two)
        ]
        minus.append(aucs[1] - aucs[0])
    assert found is not None
    assert found["auc"].half == pytest.approx(1.96 * np.std(minus), rel=0.15)


def test_a_weight_counts_like_as_many_examples():
    twice = np.where(np.arange(3000) % 3, 1.0, 2.0)
    rows = np.repeat(np.arange(3000), twice.astype(int))
    weighted = [scored(seed, weights=twice) for seed in (1, 2)]
    repeated = [Scored(*(x[rows] for x in scored(seed))) for seed in (1, 2)]
    one, two = (by_examples(*pair) for pair in (weighted, repeated))
    assert one is not None and two is not None and "auc" not in one
    assert one["logloss"].mean == pytest.approx(two["logloss"].mean)


def test_scores_of_other_examples_are_not_paired():
    one, two = scored(1), scored(2)
    other = two._replace(labels=1 - two.labels)
    assert by_examples(one, other) is None
    shorter = Scored(*(x[:-1] for x in two))
    assert by_examples(one, shorter) is None


def line(step, ne, split="valid"):
    return {"step": step, "split": split, "ne": ne, "auc": None}


def test_evaluations_are_paired_by_step_and_split():
    base = files(evals=[line(10, 0.9), line(20, 0.8), line(30, 0.7, "test")])
    other = files(evals=[line(20, 0.7), line(10, 0.86), line(30, 0.5), line("x", 1)])
    assert [a["step"] for a, _ in common_steps(base, other)] == [20, 10]
    assert set(found := by_steps(base, other)) == {"ne"}
    mean, half, count = found["ne"]
    assert (mean, count) == (pytest.approx(-0.07), 2)
    assert half == pytest.approx(12.706 * 0.03, rel=1e-3)  # t of one degree of freedom


def test_runs_are_paired_by_seed_within_groups():
    runs = [
        run(f"{recipe}{seed}", seed=seed, recipe=recipe, final={"ne": ne})
        for recipe, seed, ne in [
            *[("bf16", 0, 0.80), ("bf16", 1, 0.82), ("bf16", 2, 0.84)],
            *[("fp8", 2, 0.85), ("fp8", 1, 0.82), ("fp8", 0, 0.83), ("fp8", 7, 9.0)],
        ]
    ]
    base, other = seed_groups(runs)
    assert [x.name for x in base] == ["bf160", "bf161", "bf162"] and len(other) == 4
    mean, half, count = by_seeds(base, other)["ne"]
    minus = [0.03, 0.0, 0.01]
    assert (mean, count) == (pytest.approx(np.mean(minus)), 3)
    assert half == pytest.approx(4.3027 * np.std(minus, ddof=1) / 3**0.5, rel=1e-4)


def test_a_single_pair_has_no_interval():
    found = by_steps(files([line(1, 0.5)]), files([line(1, 0.7)]))
    assert found["ne"].half is None


@pytest.mark.parametrize(
    "other, why",
    [
        (files(data={"kind": "table", "label": "buy"}), "data.label is click and buy"),
        (files(data={"kind": "criteo"}), "data.kind is table and criteo"),
        (
            files(data={"kind": "table", "label": "click"}, split="valid")._replace(
                summary={"final_eval": {"ne": 1}, "final_split": "valid"}
            ),
            "one was evaluated on test, the other on valid",
        ),
    ],
)
def test_runs_on_other_data_are_not_comparable(other, why):
    base = files(data={"kind": "table", "label": "click"}, final={"ne": 0.9})
    assert why_not_comparable(base, base) is None
    assert why_not_comparable(base, other) == why
