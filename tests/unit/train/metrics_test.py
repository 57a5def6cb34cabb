import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as oracle

from loka_jax.train import metrics

update = jax.jit(metrics.update)


def evaluate(logits, labels, weights=None, batch=None):
    """Returns the metrics of one evaluation, in batches of `batch` rows."""
    logits = np.asarray(logits, np.float32)
    labels = np.asarray(labels, np.float32)
    weights = np.ones_like(labels) if weights is None else np.float32(weights)
    state = metrics.init()
    for start in range(0, len(logits), batch or len(logits)):
        rows = slice(start, start + (batch or len(logits)))
        state = update(state, logits[rows], labels[rows], weights[rows])
    return metrics.compute(state) | {"auc": metrics.auc(logits, labels, weights)}


def stream(num, *, spread=1.5, shift=-1.2, seed=0):
    """Returns logits and labels of a calibrated model."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(shift, spread, num).astype(np.float32)
    labels = rng.random(num) < 1 / (1 + np.exp(-logits.astype(np.float64)))
    return logits, labels.astype(np.float32)


def expected(logits, labels):
    """Returns scikit-learn's AUC and log loss, the latter in float64."""
    x = np.asarray(logits, np.float64)
    auc = oracle.roc_auc_score(labels, x)
    p = 1 / (1 + np.exp(-x))
    return auc, oracle.log_loss(labels, p)


@pytest.mark.parametrize(
    ("num", "spread", "shift"),
    [
        (2_000_000, 1.5, -1.2),
        (1_000_000, 0.1, -3.0),  # a weak model: narrow logits
        (200_000, 8.0, 0.0),  # a confident one: |logit| > 15 is common
    ],
)
def test_agrees_with_scikit_learn(num, spread, shift):
    logits, labels = stream(num, spread=spread, shift=shift)
    auc, logloss = expected(logits, labels)
    got = evaluate(logits, labels, batch=100_000)
    assert got["auc"] == pytest.approx(auc, abs=1e-12)
    assert got["logloss"] == pytest.approx(logloss, rel=1e-6)
    assert got["count"] == num


@pytest.mark.parametrize("offset", [0.0, 0.3, -700.0])
@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0, 1e3])
def test_auc_is_exact_at_any_spread_and_offset(spread, offset):
    rng = np.random.default_rng(0)
    logits = (offset + spread * rng.normal(size=2000)).astype(np.float32)
    labels = rng.random(2000) < np.where(logits > np.median(logits), 0.4, 0.2)
    below = logits[~labels][:, None] < logits[labels]
    equal = logits[~labels][:, None] == logits[labels]
    # Every pair counted; what is left is the rounding of a float64 division.
    auc = (below.sum() + equal.sum() / 2) / below.size
    assert evaluate(logits, labels)["auc"] == pytest.approx(auc, rel=1e-15)


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0, 30.0])
def test_sums_agree_with_float64_at_any_spread(spread):
    logits, labels = stream(100_000, spread=spread)
    x = logits.astype(np.float64)
    losses = np.logaddexp(0, np.where(labels == 1, -x, x))
    rate = labels.mean(dtype=np.float64)
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    got = evaluate(logits, labels, batch=10_000)
    # exp and log of float32 are off by some units of 6e-8, all alike at tiny spreads.
    assert got["logloss"] == pytest.approx(losses.mean(), rel=5e-7)
    assert got["ne"] == pytest.approx(losses.mean() / entropy, rel=5e-7)
    predictions = 1 / (1 + np.exp(-x))
    assert got["calibration"] == pytest.approx(predictions.mean() / rate, rel=5e-7)


@pytest.mark.parametrize("seed", range(8))
def test_tiny_sets_with_ties_have_the_exact_auc(seed):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 4, 12) / 2
    labels = rng.permutation([0] * 5 + [1] * 7)
    auc, logloss = expected(logits, labels)
    got = evaluate(logits, labels)
    assert got["auc"] == pytest.approx(auc, abs=1e-12)
    assert got["logloss"] == pytest.approx(logloss, rel=1e-6)


def test_confident_logits_are_ranked_and_their_loss_is_finite():
    logits = [-15.0, -15.5, 15.0, 15.5, -80.0, 80.0]
    labels = [0, 1, 0, 1, 1, 0]
    got = evaluate(logits, labels)
    assert got["auc"] == pytest.approx(oracle.roc_auc_score(labels, logits))
    assert got["logloss"] == pytest.approx((15.5 + 15.0 + 80.0 + 80.0) / 6, rel=1e-6)


def test_order_is_kept_up_to_the_largest_floats():
    magnitudes = np.float32([0, 1e-45, 3e-4, 1, 16, 1e6, 3.4028e38, 3.4028235e38])
    logits = np.concatenate([-magnitudes[:0:-1], magnitudes])
    for middle in range(1, len(logits)):
        assert evaluate(logits, np.arange(len(logits)) >= middle)["auc"] == 1.0
    assert evaluate([-0.0, 0.0], [0, 1])["auc"] == 0.5


def test_ne_is_the_log_loss_over_the_entropy_of_the_mean_label():
    logits, labels = stream(1000)
    got = evaluate(logits, labels)
    rate = labels.mean(dtype=np.float64)
    assert got["ne"] == pytest.approx(
        got["logloss"] / oracle.log_loss(labels, np.full(1000, rate)), rel=1e-9
    )


def test_predicting_the_mean_has_ne_one_and_calibration_one():
    labels = np.arange(1000) % 4 == 0
    got = evaluate(np.full(1000, math.log(0.25 / 0.75)), labels)
    assert got["ne"] == pytest.approx(1, abs=1e-6)
    assert got["calibration"] == pytest.approx(1, abs=1e-6)
    assert got["auc"] == 0.5


def test_calibration_is_mean_prediction_over_mean_label():
    got = evaluate([0.0, 0.0, 0.0, 0.0], [1, 0, 0, 0])
    assert (got["mean_prediction"], got["mean_label"]) == (0.5, 0.25)
    assert got["calibration"] == 2.0


def test_padded_rows_never_count_whatever_they_hold():
    logits, labels = stream(100)
    garbage = np.float32([np.nan, np.inf, -np.inf, 3.0])
    padded = evaluate(
        np.concatenate([logits, garbage]),
        np.concatenate([labels, np.float32([np.nan, 1, 0, 7])]),
        np.concatenate([np.ones(100), np.zeros(4)]),
    )
    assert padded == evaluate(logits, labels)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_logit_is_seen(bad):
    logits, labels = stream(100)
    logits[17] = bad
    got = evaluate(logits, labels)
    assert (got["non_finite"], got["count"]) == (1, 100)
    for name in ("auc", "logloss", "ne", "calibration", "mean_prediction"):
        assert math.isnan(got[name]), name


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_has_a_log_loss_but_no_auc_and_no_ne(label):
    got = evaluate([-1.0, 0.0, 1.0], [label] * 3)
    assert got["auc"] is None and got["ne"] is None
    assert got["logloss"] > 0
    assert (got["calibration"] is None) == (label == 0)


def test_no_rows_have_no_metrics():
    got = evaluate([1.0], [1.0], [0.0])
    assert got.pop("count") == 0 and got.pop("non_finite") == 0
    assert set(got.values()) == {None}


@pytest.mark.parametrize(
    ("label", "weight"), [(0.5, 1), (2, 1), (np.nan, 1), (1, 0.5), (1, -1), (1, np.nan)]
)
def test_a_label_or_weight_other_than_0_and_1_is_refused(label, weight):
    with pytest.raises(ValueError, match="1 rows have a weight or label other than"):
        evaluate([0.0, 1.0], [0, label], [1, weight])


def weighted_stream():
    logits, labels = stream(20_000)
    weights = np.random.default_rng(1).exponential(3.0, 20_000).astype(np.float32)
    weights[::7] = 0
    return np.round(logits, 1), labels, weights  # rounded, so that some are equal


def test_weighted_metrics_agree_with_scikit_learn():
    logits, labels, weights = weighted_stream()
    state = metrics.init(weighted=True)
    for start in range(0, len(logits), 5000):
        rows = slice(start, start + 5000)
        state = update(state, logits[rows], labels[rows], weights[rows])
    got = metrics.compute(state)
    x = logits.astype(np.float64)
    p, w = 1 / (1 + np.exp(-x)), weights.astype(np.float64)
    rate = np.average(labels, weights=w)
    logloss = oracle.log_loss(labels, p, sample_weight=w)
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    assert got["logloss"] == pytest.approx(logloss, rel=5e-7)
    assert got["ne"] == pytest.approx(logloss / entropy, rel=1e-6)
    assert metrics.capped_ne(state).ne == pytest.approx(got["ne"], rel=1e-9)
    calibration = np.average(p, weights=w) / rate
    assert got["calibration"] == pytest.approx(calibration, rel=1e-6)
    assert got["count"] == np.count_nonzero(weights)
    want = oracle.roc_auc_score(labels, x, sample_weight=w)
    assert metrics.auc(logits, labels, weights) == pytest.approx(want, abs=1e-12)


def test_whole_weights_count_like_repeated_examples():
    logits, labels, _ = weighted_stream()
    weights = np.arange(20_000, dtype=np.float32) % 4
    state = update(metrics.init(weighted=True), logits, labels, weights)
    got = metrics.compute(state) | {"auc": metrics.auc(logits, labels, weights)}
    times = weights.astype(int)
    want = evaluate(np.repeat(logits, times), np.repeat(labels, times))
    for name in ("auc", "logloss", "ne", "calibration", "mean_label"):
        assert got[name] == pytest.approx(want[name], rel=1e-6), name


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_a_weighted_state_refuses_what_is_no_weight(weight):
    rows = np.zeros(2, np.float32), np.ones(2, np.float32), np.float32([0.5, weight])
    state = update(metrics.init(weighted=True), *rows)
    with pytest.raises(ValueError, match="1 rows have a label .* negative or not fin"):
        metrics.compute(state)


def test_an_auc_of_one_weighted_class_is_undefined():
    ones = np.ones(3, np.float32)
    assert metrics.auc(np.float32([1, 2, 3]), ones, 2 * ones) is None


def test_merged_halves_equal_the_whole():
    logits, labels = stream(10_000)
    ones = np.ones(10_000, np.float32)
    halves = [
        update(metrics.init(), logits[rows], labels[rows], ones[rows])
        for rows in (slice(0, 3000), slice(3000, None))
    ]
    merged = metrics.compute(metrics.merge(*halves))
    whole = evaluate(logits, labels)
    assert merged["count"] == whole["count"]
    assert merged["ne"] == pytest.approx(whole["ne"], rel=1e-12)
    assert merged["logloss"] == pytest.approx(whole["logloss"], rel=1e-12)


def test_sums_do_not_lose_small_batches_in_a_long_run():
    """After 1e8 examples, a float32 sum would swallow what one batch adds."""
    start = metrics.init()._replace(
        loss=jnp.float32([5e7, 0]), prediction=jnp.float32([2e7, 0])
    )
    x, y, w = (jnp.float32([v]) for v in (-0.7, 0.0, 1.0))

    def body(state, _):
        return metrics.update(state, x, y, w), None

    state, _ = jax.jit(lambda s: jax.lax.scan(body, s, length=20_000))(start)
    added = np.sum(np.asarray(state.loss, np.float64)) - 5e7
    assert added == pytest.approx(20_000 * np.log1p(np.exp(-0.7)), rel=1e-6)


def test_a_batch_sum_is_exact_to_float64():
    rng = np.random.default_rng(0)
    x = rng.uniform(100, 200, 65_537) * rng.choice([1, 1e6], 65_537)
    x = x.astype(np.float32)
    # The loss of a logit that large without a click is the logit.
    state = update(metrics.init(), x, np.zeros_like(x), np.ones_like(x))
    got = np.sum(np.asarray(state.loss, np.float64))
    assert got == pytest.approx(np.sum(x, dtype=np.float64), rel=1e-12)


def test_bfloat16_logits_are_taken_as_they_are():
    logits, labels = stream(1000)
    rounded = jnp.asarray(logits).astype(jnp.bfloat16)
    got = metrics.compute(
        update(metrics.init(), rounded, labels, np.ones(1000, np.float32))
    )
    taken = evaluate(np.asarray(rounded, np.float32), labels)
    assert got == {name: taken[name] for name in got}


def test_a_few_outliers_do_not_raise_the_capped_ne():
    draw = np.random.default_rng(0)
    labels = (draw.random(8192) < 0.25).astype(np.float32)
    logits = (draw.normal(size=8192) - 1.1).astype(np.float32)
    weights = np.ones(8192, np.float32)

    def of(logits):
        return metrics.update(
            metrics.init(), *map(jnp.asarray, (logits, labels, weights))
        )

    plain = metrics.compute(of(logits))["ne"]
    assert metrics.capped_ne(of(logits)).ne == pytest.approx(plain, rel=1e-9)
    logits[:4] = np.where(labels[:4] == 1, -1e6, 1e6)
    assert metrics.compute(of(logits))["ne"] > 100
    assert metrics.capped_ne(of(logits)).ne < plain + 0.05
    assert metrics.capped_ne(of(1e4 * draw.normal(size=8192).astype(np.float32))).ne > 5
    assert np.isnan(metrics.capped_ne(of(np.full(8192, np.inf, np.float32))).ne)
    assert metrics.capped_ne(metrics.init()).ne is None
