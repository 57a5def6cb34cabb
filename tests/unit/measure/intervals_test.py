"""Intervals of few values."""

import math

import numpy as np
import pytest

from loka_jax.measure.intervals import Interval, interval, next_value


@pytest.mark.parametrize("count, is_next", [(3, False), (3, True), (50, False)])
def test_intervals_cover_at_the_rate_they_state(count, is_next):
    rng = np.random.default_rng(1)
    covered = 0
    for values in rng.normal(1.0, 0.2, size=(1000, count + 1)):
        seen, another = values[:-1], values[-1]
        found = interval(seen)
        if is_next:
            found = next_value(float(np.mean(seen)), float(np.std(seen, ddof=1)), count)
        covered += found.low <= (another if is_next else 1.0) <= found.high
    # 95 %, give or take three standard deviations of 0.7 %.
    assert 0.929 <= covered / 1000 <= 0.971


def test_edges():
    assert interval(np.array([2.0])) == Interval(2.0, 2.0, 2.0)
    assert math.isnan(interval(np.array([2.0, np.nan])).high)
    assert next_value(2.0, 0.0, 1).high == math.inf
    assert next_value(2.0, 0.0, 5) == Interval(2.0, 2.0, 2.0)
