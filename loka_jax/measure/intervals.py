"""Means over draws, with the interval that each lies in."""

import math
from typing import NamedTuple

import numpy as np

_Z95 = 1.96  # standard errors of a 95 % interval


class Interval(NamedTuple):
    """A mean, and the 95 % interval it lies in.

    Attributes:
        mean: over the draws.
        low, high: mean -+ 1.96 standard errors.
    """

    mean: float
    low: float
    high: float


def interval(values: np.ndarray) -> Interval:
    """Returns the mean of some draws and its 95 % interval; NaN if a value is NaN.

    Of a single draw all three are its value.
    """
    mean = float(np.mean(values))
    if len(values) == 1:
        return Interval(mean, mean, mean)
    half = _Z95 * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
