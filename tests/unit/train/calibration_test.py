"""A calibration finds the line that was planted, and leaves what says nothing."""

import numpy as np
import pytest

from loka_jax.train.calibration import Calibration, fitted


def drawn(seed=0, n=200_000):
    """Returns logits, and labels of another line of them."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1, 1.5, n).astype(np.float32)
    labels = rng.random(n) < 1 / (1 + np.exp(-(0.6 * logits - 0.8)))
    return logits, labels.astype(np.float32)


def test_each_task_finds_its_own_line_by_the_rows_that_count():
    logits, labels = drawn()
    two = np.stack([labels, labels], axis=1)
    two[::2, 1] = np.nan  # missing
    weights = np.ones(len(labels), np.float32)
    weights[-100:], two[-100:] = 0, 1  # padding
    both = np.stack([logits, logits + np.float32(2)], axis=1)
    found = fitted(both, two, weights)
    assert found.a == pytest.approx((0.6, 0.6), abs=0.02)
    assert found.b == pytest.approx((-0.8, -2.0), abs=0.05)
    weighted = fitted(logits, labels, np.where(labels == 1, 3, 1).astype(np.float32))
    assert weighted.b[0] == pytest.approx(-0.8 + np.log(3), abs=0.05)
    scores = 1 / (1 + np.exp(-found.of(both)[:-100, 0].astype(np.float64)))
    assert scores.mean() == pytest.approx(labels[:-100].mean(), rel=1e-4)


def test_one_kind_of_label_and_lost_logits_change_nothing():
    logits, ones = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    same = Calibration((1.0,), (0.0,))
    assert fitted(logits, ones, ones) == same
    lost = np.append(logits[1:], np.float32(np.nan))
    assert fitted(lost, np.arange(8) % 2.0, ones) == same
    assert np.array_equal(same.of(logits), logits)
