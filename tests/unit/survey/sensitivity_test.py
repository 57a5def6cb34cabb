"""The loss that a survey compares is the loss of training: weighted, by task."""

import numpy as np
import pytest

from loka_jax.measure.intervals import interval
from loka_jax.survey.sensitivity import Losses, compare, shared


def of_one_task(values, weights):
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    return Losses(np.asarray(values, np.float64)[:, None], shares[:, None])


def test_with_equal_weights_the_interval_is_that_of_the_differences():
    rng = np.random.default_rng(0)
    plain, changed = rng.normal(1, 0.3, 50), rng.normal(1.1, 0.3, 50)
    found = compare(*(of_one_task(x, np.ones(50)) for x in (plain, changed)))
    want = interval(changed - plain)
    measured = found["change"], found["low"], found["high"]
    np.testing.assert_allclose(measured, want, rtol=1e-12)
    np.testing.assert_allclose(found["loss"], plain.mean(), rtol=1e-12)
    np.testing.assert_allclose(found["moved"], np.abs(changed - plain).mean())


def test_an_example_counts_by_its_weight():
    rng = np.random.default_rng(1)
    plain, changed = rng.normal(1, 0.3, 40), rng.normal(1.1, 0.3, 40)
    weights = rng.integers(1, 4, 40)
    found = compare(*(of_one_task(x, weights) for x in (plain, changed)))
    repeated = [
        of_one_task(np.repeat(x, weights), np.ones(weights.sum()))
        for x in (plain, changed)
    ]
    want = compare(*repeated)
    for name in ("loss", "change", "relative", "moved"):
        np.testing.assert_allclose(found[name], want[name], rtol=1e-12)
    # The same example several times is no more evidence.
    assert found["high"] - found["change"] > want["high"] - want["change"]


def test_intervals_of_weighted_losses_cover_at_the_rate_they_state():
    rng, covered = np.random.default_rng(2), 0
    for _ in range(600):
        weights = rng.lognormal(0, 0.7, 80)
        difference = rng.normal(0.1, 0.05, 80) * weights**0.3
        zeros, moved = (of_one_task(x, weights) for x in (0 * difference, difference))
        found = compare(
            zeros._replace(values=zeros.values + 1),
            moved._replace(values=moved.values + 1),
        )
        # E[w^1.3] / E[w] of these weights, times 0.1.
        truth = 0.1 * np.exp(0.5 * 0.7**2 * (1.3**2 - 1))
        covered += found["low"] <= truth <= found["high"]
    assert 0.91 < covered / 600 < 0.98


@pytest.mark.parametrize("task_weights", [(), (2.0, 0.5)])
def test_a_task_has_the_mean_of_the_examples_with_its_label(task_weights):
    values = np.array([[1.0, 9.0], [3.0, 2.0], [7.0, np.nan], [5.0, 4.0]])
    weights = np.array([[1.0, 0.0], [3.0, 3.0], [0.0, 0.0], [0.0, 1.0]])
    found = shared(values, weights, task_weights)
    assert len(found.values) == 3  # one has no weight
    first, second = task_weights or (1.0, 1.0)
    assert found.mean == pytest.approx(first * 2.5 + second * 2.5)
