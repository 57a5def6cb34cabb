"""Means over draws or steps, with the interval that each lies in.

Intervals are Student's, for few values: at 3 values they reach 4.3 standard errors from
the mean, at 50 values 2.0.
"""

import math
from typing import NamedTuple

import numpy as np

_UPPER = 0.975  # an interval leaves out 2.5 % at either end


class Interval(NamedTuple):
    """A mean and its 95 % interval, whose ends may be infinite."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """The distance from the mean to the upper end."""
        return self.high - self.mean


def interval(values: np.ndarray) -> Interval:
    """Returns the mean of some draws, with the interval of the mean of all draws.

    NaN if a value is NaN. Of a single draw all three are its value.
    """
    mean, count = float(np.mean(values)), len(values)
    if count == 1:
        return Interval(mean, mean, mean)
    half = _quantile(count) * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def next_value(mean: float, deviation: float, count: int | float) -> Interval:
    """Returns the mean of some values, with the interval that another one lies in.

        mean -+ t deviation sqrt(1 + 1 / count)

    So it covers the mean of later values even if they drift within the spread.

    Args:
        deviation: their standard deviation, by `count - 1`.
        count: their number; effectively, if their weights differ.
    """
    if count <= 1:
        return Interval(mean, -math.inf, math.inf)
    half = _quantile(count) * deviation * math.sqrt(1 + 1 / count)
    return Interval(mean, mean - half, mean + half)


def _quantile(count: int | float) -> float:
    """Returns the standard errors from the mean of `count` values to either end."""
    from scipy.special import stdtrit  # a fifth of a second, not for --help

    return float(stdtrit(count - 1, _UPPER))
