"""Scored examples: their file, calibration by prediction, quality by values of columns.

`scores.npy` in a workdir has a record for each example of the final evaluation, with
the fields `logits`, `labels` and `weights`; of several labels, one field for each,
which has these three. A label that an example lacks is NaN.

The rest are numbers that the mean of all examples hides. For a set of examples with
weights w, labels y and predictions p = sigmoid(logit)

    mean label, mean prediction   = sum w y / sum w,  sum w p / sum w
    calibration                   = sum w p / sum w y
    AUC within values of a column = mean over its values of the AUC among the examples
                                    of a value, weighted by their weight; values with
                                    one label only have none

Intervals are Wilson's, 95 %, of the mean label; that of the calibration divides the
mean prediction by its ends. With weights, n is (sum w)^2 / sum w^2.
"""

import io
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from loka_jax import jsonfile
from loka_jax.data.saved_encoding import values_of
from loka_jax.data.shards import ShardFolder
from loka_jax.report.comparison import Scored
from loka_jax.terminal import clip

BINS = 15  # of predictions, with equally many examples
VALUES = 5  # of a column, the most frequent ones
SCORES = "scores.npy"
_FIELDS = [(name, np.float32) for name in Scored._fields]
_Z = 1.959964  # of a 95 % interval


class Scores(NamedTuple):
    """Scored examples, without padding rows.

    Attributes:
        logits: float32, finite.
        labels: 0 or 1; NaN where one of several is missing.
    """

    logits: Float[np.ndarray, "N"]
    labels: Float[np.ndarray, "N"]
    weights: Float[np.ndarray, "N"]
    ids: Int[np.ndarray, "N F"]


class _Sums(NamedTuple):
    """Sums over the examples of each group, [G]."""

    count: np.ndarray
    weight: np.ndarray
    squared_weight: np.ndarray
    prediction: np.ndarray
    label: np.ndarray


def breakdown(scores: Scores, columns: Sequence[str]) -> dict[str, Any]:
    """Returns the calibration curve, and the quality by columns, as JSON values.

    Both are of the examples that have the label.
    """
    scores = Scores(*(part[~np.isnan(scores.labels)] for part in scores))
    order = np.argsort(scores.logits, kind="stable")
    scores = Scores(*(part[order] for part in scores))
    return {
        "examples": len(scores.logits),
        "calibration_curve": _calibration_curve(scores),
        "columns": [
            {"column": name} | by_value(scores, field)
            for field, name in enumerate(columns)
        ],
    }


def with_names(
    columns: list[dict[str, Any]], folder: ShardFolder
) -> list[dict[str, Any]]:
    """Returns the `columns` of a breakdown with the `name` of each value.

    A name is the start of the value, None where many values share an id.
    """
    ids = {c["column"]: [value["id"] for value in c["values"]] for c in columns}
    values_by_column = values_of(folder, ids)

    def named(column: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(column["values"], values_by_column[column["column"]], strict=True)
        values = [value | {"name": name and clip(name)} for value, name in pairs]
        return column | {"values": values}

    return [named(column) for column in columns]


def _calibration_curve(scores: Scores) -> list[dict[str, Any]]:
    """Returns mean prediction and mean label of bins of equally many examples.

    Equal logits share a bin, so that there can be fewer.
    """
    logits = scores.logits
    edges = logits[np.arange(1, BINS) * len(logits) // BINS] if len(logits) else []
    starts = np.unique(np.searchsorted(logits, edges))
    groups = np.searchsorted(starts, np.arange(len(logits)), side="right")
    sums = _sums(scores, groups, len(starts) + 1)
    return [_rates(sums, i) for i in np.flatnonzero(sums.count).tolist()]


def by_value(scores: Scores, field: int) -> dict[str, Any]:
    """Returns the AUC within the values of a column, and its most frequent values.

    The column is that at a place of `Scores.ids`; the scores are in the order of their
    logits.

    Returns:
        auc_within: None if no value has both labels.
        covered: share of the weight at values that have.
        values: for each of them its id, AUC, and what a bin of the calibration curve
            has; the most frequent first.
    """
    values, groups = np.unique(scores.ids[:, field], return_inverse=True)
    sums = _sums(scores, groups, len(values))
    aucs = _aucs(scores, groups)
    has_auc = np.isfinite(aucs)
    covered = float(sums.weight[has_auc].sum())
    frequent = np.argsort(-sums.count, kind="stable")[:VALUES]
    return {
        "num_values": len(values),
        "auc_within": _ratio(float((aucs * sums.weight)[has_auc].sum()), covered),
        "covered": _ratio(covered, float(sums.weight.sum())),
        "values": [
            {"id": int(values[i]), "auc": float(aucs[i]) if has_auc[i] else None}
            | _rates(sums, i)
            for i in frequent.tolist()
        ],
    }


def _aucs(scores: Scores, groups: Int[np.ndarray, "N"]) -> Float[np.ndarray, "G"]:
    """Returns the AUC of the examples of each group; NaN for a single label.

    It is the weight of pairs in the right order, and half of that of pairs with equal
    logits, over the weight of all pairs. Both are sums over clicks in one order, and no
    term of the first is larger than that of the second: no rounding brings it above 1.
    """
    order = np.argsort(groups, kind="stable")  # by logit in each group
    groups, logits = groups[order], scores.logits[order]
    weights = scores.weights[order].astype(np.float64)
    clicks = weights * (scores.labels[order] == 1)
    others = weights - clicks
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    is_new = (np.diff(groups, prepend=-1) != 0) | (np.diff(logits, prepend=0) != 0)
    ties = np.flatnonzero(is_new)  # where a run of equal logits begins
    clicks_of_tie, others_of_tie = (np.add.reduceat(x, ties) for x in (clicks, others))
    # The weight of the non-clicks before each tie, and of all of them.
    before = np.concatenate([[0.0], np.cumsum(others_of_tie)])
    first = np.searchsorted(ties, starts)  # the first tie of each group
    end = np.append(first[1:], len(ties))
    group = groups[ties]
    below = (before[:-1] + before[1:]) / 2 - before[first][group]
    everything = before[end][group] - before[first][group]
    right = np.add.reduceat(clicks_of_tie * below, first)
    pairs = np.add.reduceat(clicks_of_tie * everything, first)
    with np.errstate(invalid="ignore"):
        return right / pairs


def _sums(scores: Scores, groups: Int[np.ndarray, "N"], count: int) -> _Sums:
    weights = scores.weights.astype(np.float64)
    # The sigmoid, without an overflow at logits below -709.
    predictions = np.exp(-np.logaddexp(0.0, -scores.logits.astype(np.float64)))
    terms = (weights, weights**2, weights * predictions, weights * scores.labels)
    counts = np.bincount(groups, minlength=count)
    return _Sums(counts, *(np.bincount(groups, x, count) for x in terms))


def _rates(sums: _Sums, group: int) -> dict[str, Any]:
    """Returns count, mean prediction and label, calibration, and their intervals."""
    count, total, squares, prediction, label = (float(x[group]) for x in sums)
    prediction, label = prediction / total, label / total
    low, high = wilson(label, total**2 / squares)
    return {
        "count": int(count),
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


def write_scores(workdir: str | os.PathLike, scores: Mapping[str, Scores]) -> None:
    """Writes a NumPy file with a record for each example, in one step.

    The scores are of the same examples, by label.
    """
    (first, *others) = scores.values()
    dtype = [(name, _FIELDS) for name in scores] if others else _FIELDS
    records = np.empty(len(first.logits), dtype)
    for name, part in scores.items():
        own = records[name] if others else records
        for field in Scored._fields:
            own[field] = getattr(part, field)
    file = io.BytesIO()
    np.save(file, records)
    jsonfile.write_bytes(pathlib.Path(workdir) / SCORES, file.getvalue())


def read_scores(workdir: str | os.PathLike) -> dict[str, Scored]:
    """Returns the scored examples of a run by label; none if it has none.

    Of a single label the name is "". Of several, each has the examples that have it.

    Raises:
        ValueError: if the file is not what a run writes.
    """
    path = pathlib.Path(workdir) / SCORES
    if not path.exists():
        return {}
    try:
        with open(path, "rb") as file:
            records = np.load(file, allow_pickle=False)
        if records.ndim == 1 and records.dtype == _FIELDS:
            return {"": _scored(records)}
        if records.ndim == 1 and records.dtype.names is not None:
            return {name: _scored(records[name]) for name in records.dtype.names}
    except (OSError, EOFError, ValueError, IndexError, TypeError):
        pass
    raise ValueError(f"{path} is broken: delete it, to do without it.")


def _scored(records: np.ndarray) -> Scored:
    """Returns the examples that have a label, if all are what a run writes."""
    records = records[~np.isnan(records["labels"])]
    logits, labels, weights = (records[x].astype(np.float32) for x in Scored._fields)
    if not np.all(np.isfinite(logits) & np.isin(labels, (0, 1)) & (weights > 0)):
        raise ValueError("it has other values than scores, labels and weights.")
    return Scored(logits, labels, weights)
