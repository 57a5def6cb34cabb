"""The expected number of distinct ids in a batch of a power law."""

import math

import numpy as np

_EXACT = 4096  # the first ids, one by one; further ones in ranges of equal odds
_RANGES = 2048


def expected_distinct(rows: int, draws: int, zipf: float | None) -> float:
    """Returns the distinct ids among independent draws, `sum_k 1 - (1 - p_k)^draws`.

    Args:
        rows: of a table; ids are 1..rows-1.
        draws: the number of ids.
        zipf: exponent of `P(k) ~ k^-zipf` as `planted.zipf_ids` draws it; None if
            nothing is known, for the most that there can be.
    """
    if zipf is None:
        return float(min(rows, draws))
    if rows <= 2:
        return 1.0
    edges = np.arange(1.0, min(rows, _EXACT) + 1)
    if rows > _EXACT:
        further = np.unique(np.round(np.geomspace(_EXACT, rows, _RANGES)))
        edges = np.append(edges, further[1:])
    ids = np.diff(edges)
    odds = np.diff(_cdf(edges, rows, zipf)) / ids
    return float(np.sum(-np.expm1(draws * np.log1p(-odds)) * ids))


def _cdf(x: np.ndarray, rows: int, zipf: float) -> np.ndarray:
    """Returns the share of the continuous power law on [1, rows) below x."""
    q = 1.0 - zipf
    if abs(q) < 1e-6:
        return np.log(x) / math.log(rows)
    return np.expm1(q * np.log(x)) / np.expm1(q * math.log(rows))
