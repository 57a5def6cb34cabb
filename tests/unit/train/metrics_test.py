"""AUC, log loss, NE and calibration against scikit-learn and float64 sums."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as oracle

from loka_jax.train import metrics
from loka_jax.train.scores import Scores, by_value

SIZE = 4096  # of all batches, padded with zero weights: one program for all
_update = jax.jit(metrics.update)


def update(state, logits, labels, weights):
    """Returns the metrics with rows added, in batches of `SIZE` rows.

    The last is padded with rows that never count, whatever they hold.
    """
    padding = ((0, -len(logits) % SIZE),)
    columns = zip((logits, labels, weights), (np.nan, 7, 0), strict=True)
    padded = [np.pad(np.float32(x), padding, constant_values=v) for x, v in columns]
    for start in range(0, len(padded[0]), SIZE):
        state = _update(state, *(x[start : start + SIZE] for x in padded))
    return state


def evaluate(logits, labels, weights=None, *, weighted=False):
    """Returns the metrics of one evaluation, merged of those of two parts."""
    logits, labels = np.float32(logits), np.float32(labels)
    weights = np.ones_like(labels) if weights is None else np.float32(weights)
    columns, start = (logits, labels, weights), metrics.init(weighted=weighted)
    parts = [update(start, *(x[i::2] for x in columns)) for i in range(2)]
    values = metrics.compute(metrics.merge(*parts))
    return values | {"auc": metrics.auc(*columns)}


def stream(num, *, spread=1.5, shift=-1.2, seed=0):
    """Returns logits and labels of a calibrated model."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(shift, spread, num).astype(np.float32)
    labels = rng.random(num) < 1 / (1 + np.exp(-logits.astype(np.float64)))
    return logits, labels.astype(np.float32)


def weighted_stream():
    """Returns logits, some of which are equal, labels and weights."""
    logits, labels = stream(20_000)
    weights = np.random.default_rng(1).exponential(3.0, 20_000).astype(np.float32)
    weights[::7] = 0
    return np.round(logits, 1), labels, weights


# Of weak models logits are narrow, of confident ones |logit| > 15 is common.
@pytest.mark.parametrize("spread", [1.5, 0.1, 8.0, 30.0, 1e-6, "weighted"])
def test_metrics_agree_with_scikit_learn(spread):
    weighted = spread == "weighted"
    if weighted:
        logits, labels, weights = weighted_stream()
    else:
        logits, labels = stream(20_000, spread=spread)
        weights = np.ones_like(labels)
    x, w = logits.astype(np.float64), weights.astype(np.float64)
    mean = functools.partial(np.average, weights=w)
    p, rate = mean(1 / (1 + np.exp(-x))), mean(labels)
    # From the logits: 1 - p has no digits left where p is nearly 1.
    logloss = mean(np.logaddexp(0, np.where(labels == 1, -x, x)))
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    got = evaluate(logits, labels, weights, weighted=weighted)
    auc = oracle.roc_auc_score(labels, x, sample_weight=w)
    assert got.pop("auc") == pytest.approx(auc, abs=1e-12)
    # exp and log of float32 are off by some units of 6e-8, all alike at tiny spreads.
    assert got == pytest.approx(
        {
            "logloss": logloss,
            "ne": logloss / entropy,
            "calibration": p / rate,
            "mean_prediction": p,
            "mean_label": rate,
            "count": np.count_nonzero(weights),
            "non_finite": 0,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize("spread, offset", [(1e-6, 0.3), (1e-3, -700.0), (1e3, 0.0)])
def test_auc_is_exact_at_any_spread_and_offset(spread, offset):
    rng = np.random.default_rng(0)
    logits = (offset + spread * rng.normal(size=2000)).astype(np.float32)
    labels = rng.random(2000) < np.where(logits > np.median(logits), 0.4, 0.2)
    pairs = np.sign(logits[labels] - logits[~labels][:, None])
    # Every pair counted; what is left is the rounding of a float64 division.
    want = np.mean(pairs / 2 + 0.5, dtype=np.float64)
    assert metrics.auc(logits, labels, np.ones(2000)) == pytest.approx(want, rel=1e-15)


def test_padded_rows_never_count_in_an_auc_whatever_they_hold():
    logits, labels = stream(100)
    ends = np.float32([np.nan, np.inf]), np.float32([np.nan, 7]), np.zeros(2)
    columns = logits, labels, np.ones(100)
    padded = [np.append(x, end) for x, end in zip(columns, ends, strict=True)]
    assert metrics.auc(*padded) == metrics.auc(*columns)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_non_finite_logit_is_seen(bad):
    logits, labels = stream(100)
    logits[17] = bad
    got = evaluate(logits, labels)
    assert (got["non_finite"], got["count"]) == (1, 100)
    names = ("auc", "logloss", "ne", "calibration", "mean_prediction")
    assert all(math.isnan(got[name]) for name in names)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_a_log_loss_but_no_auc_and_no_ne(label):
    got = evaluate([-1.0, 0.0, 1.0], [label] * 3)
    assert got["auc"] is None and got["ne"] is None
    assert got["logloss"] > 0
    assert (got["calibration"] is None) == (label == 0)


@pytest.mark.parametrize(
    "label, weight, weighted",
    [(0.5, 1, False), (np.nan, 1, False), (1, 0.5, False), (1, -1, True)]
    + [(1, np.nan, True), (1, np.inf, True), (0.5, 1, True)],
)
def test_other_labels_and_weights_are_refused(label, weight, weighted):
    with pytest.raises(ValueError, match="1 rows have a .*label"):
        evaluate([0.0, 1.0], [0, label], [1, weight], weighted=weighted)


def test_sums_do_not_lose_small_batches_in_a_long_run():
    """After 1e8 examples, a float32 sum would swallow what one batch adds."""
    start = metrics.init()._replace(loss=jnp.float32([5e7, 0]))
    row = [jnp.float32([v]) for v in (-0.7, 0.0, 1.0)]
    body = lambda state, _: (metrics.update(state, *row), None)  # noqa: E731
    state, _ = jax.jit(lambda s: jax.lax.scan(body, s, length=20_000))(start)
    added = np.sum(np.asarray(state.loss, np.float64)) - 5e7
    assert added == pytest.approx(20_000 * np.log1p(np.exp(-0.7)), rel=1e-6)


def capped(logits, labels):
    """Returns the capped NE of examples, and the NE that is not capped."""
    state = update(metrics.init(weighted=True), logits, labels, np.ones_like(labels))
    return metrics.capped_ne(state), metrics.compute(state)["ne"]


def test_a_few_outliers_do_not_raise_the_capped_ne():
    draw = np.random.default_rng(0)
    labels = (draw.random(SIZE) < 0.25).astype(np.float32)
    logits = (draw.normal(size=SIZE) - 1.1).astype(np.float32)
    plain, ne = capped(logits, labels)
    assert plain.ne is not None and plain.ne == pytest.approx(ne, rel=1e-9)
    logits[:4] = np.where(labels[:4] == 1, -1e6, 1e6)
    found, ne = capped(logits, labels)
    entropy = oracle.log_loss(labels, np.full(SIZE, labels.mean(dtype=np.float64)))
    most = 4 * metrics.LOSS_CAP / SIZE / entropy
    assert found.ne is not None and plain.ne < found.ne < plain.ne + most < 100 < ne
    found, _ = capped(1e4 * draw.normal(size=SIZE), labels)
    assert found.ne is not None and found.ne > 5
    assert math.isnan(capped(np.full(SIZE, np.inf), labels)[0].ne or 0.0)
    assert metrics.capped_ne(metrics.init()) == metrics.CappedNe(None, 1.0, 0)


@pytest.mark.parametrize("label", [0, 1])
def test_the_rarer_label_and_the_ne_of_one_half_are_told(label):
    found, _ = capped(np.zeros(1000), np.where(np.arange(1000) < 30, label, 1 - label))
    entropy = -0.03 * math.log(0.03) - 0.97 * math.log(0.97)
    assert (found.rarer, found.of_half) == (30, pytest.approx(math.log(2) / entropy))
    assert found.ne == pytest.approx(found.of_half, rel=1e-6)


def test_metrics_of_tasks_are_those_of_each_alone():
    rng = np.random.default_rng(1)
    labels, weights = rng.integers(0, 2, (2, SIZE, 3))
    columns = [np.float32(x) for x in (rng.normal(size=(SIZE, 3)), labels, weights)]
    together = jax.device_get(_update(metrics.init(tasks=3), *columns))
    for task, part in enumerate(metrics.split_tasks(together)):
        alone = _update(metrics.init(), *(x[:, task] for x in columns))
        chex.assert_trees_all_close(part, jax.device_get(alone), rtol=1e-6)


def test_the_worst_task_whose_ne_is_defined_tells_divergence():
    labels = np.stack([np.arange(SIZE) // 2 % 2] * 2 + [np.zeros(SIZE)], axis=1)
    columns = [x.astype(np.float32) for x in (labels, np.ones_like(labels))]
    logits = np.float32([[0, 9, 0]]).repeat(SIZE, axis=0)
    state = _update(metrics.init(tasks=3), logits, *columns)
    nes = [metrics.capped_ne(part).ne for part in metrics.split_tasks(state)]
    assert nes == [pytest.approx(1.0), metrics.capped_ne(state).ne, None]
    assert nes[1] > 6 and metrics.capped_ne(state).rarer == SIZE // 2
    logits[0, 0] = np.nan
    state = _update(metrics.init(tasks=3), logits, *columns)
    assert math.isnan(metrics.capped_ne(state).ne or 0.0)


def test_no_rounding_brings_an_area_above_one():
    rng = np.random.default_rng(0)
    for size in range(2, 200):
        labels = np.float32(np.arange(size) >= size // 2)
        weights = np.float32(rng.random(size) * 10.0 ** rng.integers(-3, 9))
        logits = np.float32(np.arange(size))  # a perfect order
        assert metrics.auc(logits, labels, weights) == 1
        scores = Scores(logits, labels, weights, rng.integers(0, 2, (size, 1)))
        within = by_value(scores, 0)
        found = [value["auc"] for value in within["values"]] + [within["auc_within"]]
        assert {1.0, None}.issuperset(found)
