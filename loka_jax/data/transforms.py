"""What a model reads of a number or a time: a dense value, or an id.

`experiments/export.py` copies this file into each folder that it writes, so that an
exported model reads what training read. Values are float64, NaN where missing; a step
is a name and its numbers, as in `("clip", 0.0, 100.0)`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

# Times as numbers are in seconds, milli-, micro- or nanoseconds since 1970: below these
# limits, which tells dates from 1973 to 5138 apart.
_LIMITS, _UNITS = (1e11, 1e14, 1e17), np.array([1.0, 1e3, 1e6, 1e9])
_DAY, _MONDAY = 86400.0, 3  # seconds; days from it to the first day of 1970


def dense(values: np.ndarray, steps: Sequence[Sequence[Any]]) -> np.ndarray:
    """Returns the values after all steps, in float64; missing ones begin as 0."""
    x = np.where(np.isnan(values), 0.0, values)
    for name, *numbers in steps:
        if name == "log1p":
            x = np.copysign(np.log1p(np.abs(x)), x)
        elif name == "clip":
            x = np.clip(x, *numbers)
        elif name == "standardize":
            x = (x - numbers[0]) / numbers[1]
        elif name == "missing":
            x = np.isnan(values).astype(np.float64)
    return x


def ids(values: np.ndarray, step: Sequence[Any]) -> np.ndarray:
    """Returns int32 ids: 1 and up for the bucket, hour or weekday, 0 for missing ones.

    Weekdays begin with Monday, and hours are those of UTC.
    """
    (name, *numbers), missing = step, ~np.isfinite(values)
    x = np.where(missing, 0.0, values)
    if name == "buckets":
        part = np.searchsorted(np.array(numbers), x, side="left")
    else:
        # To a millisecond, as 3600e6 microseconds may be 3599.9999999 seconds.
        days, rest = np.divmod(np.round(seconds(x), 3), _DAY)
        part = (days + _MONDAY) % 7 if name == "weekday" else rest // 3600
    return np.where(missing, 0, 1 + part).astype(np.int32)


def seconds(times: np.ndarray) -> np.ndarray:
    """Returns times as seconds since 1970, by the units of `_LIMITS`."""
    return times / _UNITS[np.searchsorted(_LIMITS, np.abs(times), side="right")]
