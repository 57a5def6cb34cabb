"""Summaries of a site's statistics, and warnings where there are too few."""

from typing import Any

import numpy as np

from loka_jax.probe.site import Rows, SiteStats, Weight
from loka_jax.probe.tails import Tails

# Fewest rows per feature, and fewest weights, for trustworthy covariances.
_ROWS_PER_FEATURE, _LEAST_WEIGHTS = 10, 20
_SPECTRUM_POINTS = 48


def summarize(stats: SiteStats) -> dict[str, dict[str, Any]]:
    """Returns JSON-ready numbers for lhs, rhs and g."""
    return {
        "lhs": _of_rows(stats.lhs),
        "rhs": _of_weight(stats.rhs),
        "g": _of_rows(stats.g),
    }


def warnings_of(path: str, stats: SiteStats) -> list[str]:
    """Returns sentences on statistics of a site that are too few to trust."""
    rows, k = float(stats.lhs.moments.count), stats.lhs.moments.mean.shape[0]
    n = stats.g.moments.mean.shape[0]
    warnings = []
    least = _ROWS_PER_FEATURE * max(k, n)
    if rows < least:
        warnings.append(
            f"{path}: {rows:,.0f} rows are too few for {max(k, n)} features, which "
            f"need {least:,}: observe more steps (--probe.every) or forget less "
            "(--probe.decay)."
        )
    weights = float(stats.rhs.normal.steps)
    if weights < _LEAST_WEIGHTS:
        warnings.append(
            f"{path}: the weight was observed {weights:.0f} times, fewer than "
            f"{_LEAST_WEIGHTS}: observe more steps (--probe.every)."
        )
    return warnings


def _of_rows(rows: Rows) -> dict[str, Any]:
    moments = rows.moments
    covariance = np.asarray(moments.scatter) / max(float(moments.count) - 1, 1.0)
    values = _spectrum(covariance, moments.mean.shape[0])
    return _of_tails(rows.tails) | {
        "rows": float(moments.count),
        "mean_norm": float(np.linalg.norm(moments.mean)),
        "spectrum": _thinned(values),
        "effective_rank": _effective_rank(values),
    }


def _of_weight(weight: Weight) -> dict[str, Any]:
    k, n = weight.normal.mean.shape
    return _of_tails(weight.tails) | {
        "weights": float(weight.normal.steps),
        "spectrum": _thinned(_spectrum(np.asarray(weight.normal.rows), k)),
        "column_spectrum": _thinned(_spectrum(np.asarray(weight.normal.columns), n)),
    }


def _of_tails(tails: Tails) -> dict[str, Any]:
    return {
        "mean": float(tails.mean),
        "deviation": float(np.sqrt(tails.variance)),
        "kurtosis": float(tails.kurtosis),
        "amax": float(tails.amax),
        "amax_ratio": float(tails.amax_ratio),
        "underflow": float(tails.underflow_rate),
        "saturation": float(tails.saturation_rate),
    }


def _spectrum(blocks: np.ndarray, features: int) -> np.ndarray:
    """Returns the eigenvalues of all blocks, the largest first."""
    values = np.linalg.eigvalsh(blocks.astype(np.float64)).ravel()
    return np.sort(values)[::-1][:features].clip(min=0)


def _effective_rank(values: np.ndarray) -> float:
    """Returns `(sum v)^2 / sum v^2`, the effective number of directions."""
    squares = float(np.sum(values**2))
    return float(np.sum(values)) ** 2 / squares if squares > 0 else 0.0


def _thinned(values: np.ndarray) -> list[float]:
    """Returns some of the values, spread evenly over their ranks."""
    places = np.linspace(0, len(values) - 1, min(len(values), _SPECTRUM_POINTS))
    return [float(values[int(i)]) for i in places]
