"""Summaries of a site's statistics, and warnings where there are too few."""

from typing import Any

import numpy as np

from loka_jax.probe.elements import Elements
from loka_jax.probe.site import SiteStats

# Fewest rows per feature, and fewest weights, for trustworthy covariances.
_ROWS_PER_FEATURE, _LEAST_WEIGHTS = 10, 20
_SPECTRUM_POINTS = 48


def summarize(stats: SiteStats) -> dict[str, dict[str, Any]]:
    """Returns JSON-ready numbers for lhs, rhs and g."""
    k, n = stats.rhs.normal.mean.shape
    summary = {}
    for name, width in (("lhs", k), ("g", n)):
        rows = getattr(stats, name)
        values = _spectrum(rows.moments.covariance, width)
        rank = {"effective_rank": _effective_rank(values)}
        summary[name] = _described(rows.elements, values) | rank
    values = _spectrum(stats.rhs.normal.rows, k)
    return summary | {"rhs": _described(stats.rhs.elements, values)}


def warnings_of(path: str, stats: SiteStats) -> list[str]:
    """Returns sentences on statistics of a site that are too few to trust."""
    rows, features = float(stats.lhs.moments.count), max(stats.rhs.normal.mean.shape)
    least, warnings = _ROWS_PER_FEATURE * features, []
    if rows < least:
        warnings.append(
            f"{path}: {rows:,.0f} rows are too few for {features} features, which "
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


def _described(elements: Elements, spectrum: np.ndarray) -> dict[str, Any]:
    """Returns statistics of elements, and of the spectrum ranks at equal distances."""
    count = min(len(spectrum), _SPECTRUM_POINTS)
    places = np.linspace(0, len(spectrum) - 1, count).astype(int)
    told = {
        name: float(x) for name, x in elements.read().items() if name != "last_amax"
    }
    return told | {"spectrum": spectrum[places].tolist()}


def _spectrum(blocks: Any, features: int) -> np.ndarray:
    """Returns the eigenvalues of all blocks, the largest first."""
    values = np.linalg.eigvalsh(np.asarray(blocks, np.float64)).ravel()
    return np.sort(values)[::-1][:features].clip(min=0)


def _effective_rank(values: np.ndarray) -> float:
    """Returns `(sum v)^2 / sum v^2`, the effective number of directions."""
    squares = float(np.sum(values**2))
    return float(np.sum(values)) ** 2 / squares if squares > 0 else 0.0
