"""What one number hides: calibration by prediction, quality by values of columns.

All are of scored examples on the host. For a set of examples with weights w, labels y
and predictions p = sigmoid(logit)

    mean label, mean prediction   = sum w y / sum w,  sum w p / sum w
    calibration                   = sum w p / sum w y
    AUC within values of a column = mean over its values of the AUC among the examples
                                    of a value, weighted by their weight; values with
                                    one label only have none

Intervals are Wilson's, 95 %, of the mean label; that of the calibration divides the
mean prediction by its ends. With weights, n is (sum w)^2 / sum w^2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

BINS = 15  # of predictions, with equally many examples
VALUES = 5  # of a column, the most frequent ones
_Z = 1.959964  # of a 95 % interval


class Scores(NamedTuple):
    """Scored examples, without padding rows.

    Attributes:
        logits: float32, finite.
        labels: 0 or 1.
        weights: positive.
        ids: of each categorical column.
    """

    logits: Float[np.ndarray, "N"]
    labels: Float[np.ndarray, "N"]
    weights: Float[np.ndarray, "N"]
    ids: Int[np.ndarray, "N F"]


def breakdown(scores: Scores, columns: Sequence[str]) -> dict[str, Any]:
    """Returns the calibration curve, and the quality by columns, as JSON values."""
    return {
        "examples": len(scores.logits),
        "calibration_curve": calibration_curve(scores),
        "columns": [
            {"column": name} | by_value(scores, scores.ids[:, field])
            for field, name in enumerate(columns)
        ],
    }


def calibration_curve(scores: Scores, bins: int = BINS) -> list[dict[str, Any]]:
    """Returns mean prediction and mean label of bins of equally many examples.

    Bins hold the examples in the order of their logits; equal logits share a bin, so
    that there can be fewer.
    """
    order = np.argsort(scores.logits, kind="stable")
    logits = scores.logits[order]
    edges = logits[np.arange(1, bins) * len(logits) // bins] if len(logits) else []
    starts = np.unique(np.searchsorted(logits, [-np.inf, *edges]))
    return [
        _rates(scores, order[start:end])
        for start, end in zip(starts, [*starts[1:], len(logits)], strict=True)
        if end > start
    ]


def by_value(
    scores: Scores, ids: Int[np.ndarray, "N"], count: int = VALUES
) -> dict[str, Any]:
    """Returns the AUC within the values of a column, and its most frequent values.

    Returns:
        auc_within: None if no value has both labels.
        covered: share of the weight at values that have.
        values: for each of them its id, AUC, and what a bin of the calibration curve
            has; the most frequent first.
    """
    aucs, weights, found = _auc_by_value(scores, ids)
    has_auc = np.isfinite(aucs)
    covered = float(weights[has_auc].sum())
    sizes = np.bincount(np.searchsorted(found, ids), minlength=len(found))
    frequent = np.argsort(-sizes, kind="stable")[:count]
    return {
        "num_values": len(found),
        "auc_within": _ratio(float((aucs * weights)[has_auc].sum()), covered),
        "covered": _ratio(covered, float(weights.sum())),
        "values": [
            {"id": int(found[i]), "auc": float(aucs[i]) if has_auc[i] else None}
            | _rates(scores, np.flatnonzero(ids == found[i]))
            for i in frequent
        ],
    }


def _auc_by_value(scores: Scores, ids: np.ndarray):
    """Returns the AUC of the examples of each value, their weight, and the values.

    The AUC is NaN for a single label. It is the weight of pairs in the right order, and
    half of that of pairs with equal logits, over the weight of all pairs.
    """
    order = np.lexsort((scores.logits, ids))
    ids, logits = ids[order], scores.logits[order]
    weights = scores.weights[order].astype(np.float64)
    clicks = weights * (scores.labels[order] == 1)
    others = weights - clicks
    values, starts = np.unique(ids, return_index=True)
    is_new = np.r_[True, (ids[1:] != ids[:-1]) | (logits[1:] != logits[:-1])]
    ties = np.flatnonzero(is_new[: len(ids)])  # where a run of equal logits begins
    clicks_of_tie, others_of_tie = (np.add.reduceat(x, ties) for x in (clicks, others))
    below = np.cumsum(others_of_tie) - others_of_tie
    first = np.searchsorted(ties, starts)  # the first tie of each value
    value_of_tie = np.repeat(np.arange(len(values)), np.diff([*first, len(ties)]))
    below -= below[first][value_of_tie]
    right = np.add.reduceat(clicks_of_tie * (below + others_of_tie / 2), first)
    clicks, others = (np.add.reduceat(x, starts) for x in (clicks, others))
    with np.errstate(invalid="ignore"):
        return right / (clicks * others), clicks + others, values


def _rates(scores: Scores, rows: Int[np.ndarray, "n"]) -> dict[str, Any]:
    """Returns count, mean prediction and label, calibration, and their intervals."""
    weights = scores.weights[rows].astype(np.float64)
    predictions = 1 / (1 + np.exp(-scores.logits[rows].astype(np.float64)))
    total = float(weights.sum())
    label = float(weights @ scores.labels[rows]) / total
    prediction = float(weights @ predictions) / total
    low, high = wilson(label, total**2 / float(weights @ weights))
    return {
        "count": len(rows),
        "mean_prediction": prediction,
        "mean_label": label,
        "mean_label_low": low,
        "mean_label_high": high,
        "calibration": _ratio(prediction, label),
        "calibration_low": _ratio(prediction, high),
        "calibration_high": _ratio(prediction, low),
    }


def wilson(rate: float, count: float) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a rate that was seen in so many examples."""
    spread = _Z**2 / count
    middle = (rate + spread / 2) / (1 + spread)
    half = _Z * (rate * (1 - rate) / count + spread / (4 * count)) ** 0.5 / (1 + spread)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
