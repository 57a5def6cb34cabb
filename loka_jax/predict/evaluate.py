"""The quality of a trained run on labelled rows of files, by columns, too.

    log loss     = sum w l / sum w
    NE           = log loss / H(mean label),  H(q) = -q log q - (1 - q) log(1 - q)
    calibration  = mean prediction / mean label
    GAUC         = the mean AUC of the groups with both labels, by their weight
    NDCG@k       = the mean over groups with a click of DCG / the best possible DCG,
                   DCG = sum over the first k rows by score of y / log2(1 + rank)

Intervals are of 95 %, normal, over rows; that of NE takes H as known, that of the AUC
is DeLong's.
"""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int
from scipy.special import expit

from loka_jax.data.blocks import BadRows, Block, as_dates, pc, plain
from loka_jax.data.encoding import as_text
from loka_jax.data.files import unchanged
from loka_jax.data.places import stamp_of
from loka_jax.data.values import Counts, parse_labels, parse_weights
from loka_jax.predict.files import as_texts, blocks_of, chosen_files
from loka_jax.predict.predictor import Predictor
from loka_jax.report.comparison import Scored, auc_half
from loka_jax.train import metrics
from loka_jax.train.own_functions import Metrics, measured, metrics_of
from loka_jax.train.scores import Scores, by_value

_Z = 1.959964  # of a 95 % interval
_GROUPS = 20  # of the most rows, that are told apart
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


class Evaluated(NamedTuple):
    """The quality of a run on rows.

    Attributes:
        overall: the numbers of each task, by its label: `rows`, `clicks`, and `auc`,
            `logloss`, `ne` and `calibration`, each with `_half` its interval; None
            where there is nothing to judge by. With a column of lists that were
            ranked, `gauc` and `ndcg`, too; those of `Config.metrics` under `metrics`.
        groups: the same of the values of the columns, those of most rows first;
            days in their order.
        irregular: values that a policy applied to, by column and kind; `oov` counts
            those without an id of their own.
    """

    overall: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, dict[str, Any]]]
    irregular: dict[str, dict[str, int]]


def evaluate_files(
    predictor: Predictor,
    path: str | os.PathLike | Sequence[str],
    *,
    where: str | None = None,
    by: tuple[str, ...] = (),
    within: str | None = None,
    k: int = 10,
) -> Evaluated:
    """Returns how good a run is on labelled rows.

    Args:
        path: files with the columns and the labels that the run was trained on, as of
            `score_file`. Of an event log they have the histories, too.
        where: which rows, as in "dt=2026-11-14"; None for all. The others of an event
            log are not judged, but are events of histories.
        by: one or two columns, whose values rows are told apart by; dates by days.
        within: a column whose values are groups of rows that were ranked, such as users
            or requests, for GAUC and NDCG.
        k: rows of a group that count for NDCG.

    Raises:
        ValueError: one sentence with the file, the row or the column and the remedy.
    """
    if k < 1:
        raise ValueError(f"--k {k} must be at least 1.")
    own = metrics_of(predictor.config.metrics)
    counts, groups = Counts(), {}
    rows = judged_rows(
        predictor, path, where=where, by=by, within=within, counts=counts
    )
    if by:
        ranked = pc.value_counts(rows.keys.combine_chunks())
        order = np.argsort(-np.asarray(ranked.field(1)), kind="stable")[:_GROUPS]
        keys = ranked.field(0).take(pa.array(order)).to_pylist()
        if all(map(_DAY.fullmatch, keys)):
            keys.sort()
        for key in keys:
            mask = np.asarray(pc.equal(rows.keys, key).combine_chunks())
            groups[key] = _by_task(rows.taken(mask), k, own)
    return Evaluated(_by_task(rows, k, own), groups, counts.report()["columns"])


class Judged(NamedTuple):
    """Labelled rows of N with T tasks.

    Attributes:
        labels: 0 or 1; NaN where one of several is missing.
        keys: the values of the columns that rows are told apart by, as text.
        groups: the number of each row's group; None without one.
    """

    tasks: tuple[str, ...]
    logits: Float[np.ndarray, "N T"]
    labels: Float[np.ndarray, "N T"]
    weights: Float[np.ndarray, "N"]
    keys: pa.ChunkedArray
    groups: Int[np.ndarray, "N"] | None

    def taken(self, rows: np.ndarray) -> "Judged":
        """Returns some of the rows."""
        groups = None if self.groups is None else self.groups[rows]
        keys = self.keys.filter(pa.array(rows))
        own = self.logits[rows], self.labels[rows], self.weights[rows]
        return Judged(self.tasks, *own, keys, groups)

    def of_task(self, task: int) -> tuple[Scored, Int[np.ndarray, "M"] | None]:
        """Returns the rows that have the label of a task, and their groups."""
        known = ~np.isnan(self.labels[:, task])
        groups = None if self.groups is None else self.groups[known]
        own = self.logits[known, task], self.labels[known, task], self.weights[known]
        return Scored(*own), groups


def judged_rows(
    predictor: Predictor,
    path: str | os.PathLike | Sequence[str],
    *,
    where: str | None = None,
    by: tuple[str, ...] = (),
    within: str | None = None,
    counts: Counts | None = None,
) -> Judged:
    """Returns labelled rows with their logits; see `evaluate_files`."""
    counts = counts or Counts()
    paths, config = as_texts(path), predictor.encoding.config
    files, rule = chosen_files(config, paths, where)
    further = tuple(x for x in (config.weight, within) if x is not None)
    names = (*predictor.columns, *predictor.tasks, *further, *by)
    columns = tuple(dict.fromkeys(names))
    blocks = blocks_of(config, files, rule, columns, BadRows(config.max_bad_rows))
    parts, groups = [], []
    with unchanged({file: stamp_of(file) for file in files}):
        for table, logits in predictor.with_logits(blocks, counts, judged=True):
            numbers = np.arange(1, len(logits) + 1)
            block = Block(table, numbers, ", ".join(paths))
            parts.append(_part(block, logits, predictor.tasks, config.weight, by))
            groups += [] if within is None else [_texts(block, within)]
    if not sum(len(part[0]) for part in parts):
        raise ValueError(f"{', '.join(paths)} has no rows: name a file that has some.")
    logits, labels, weights = (
        np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[:3]
    )
    numbers = None
    if within is not None:
        encoded = pa.chunked_array(groups).combine_chunks().dictionary_encode()
        numbers = np.asarray(encoded.indices)
    keys = pa.chunked_array([part[3] for part in parts])
    return Judged(predictor.tasks, logits, labels, weights, keys, numbers)


def _part(
    block: Block,
    logits: np.ndarray,
    tasks: tuple[str, ...],
    weight: str | None,
    by: tuple[str, ...],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, pa.Array]:
    """Returns logits and labels [rows, T], weights, and the values of `by` as text."""
    shape = len(logits), len(tasks)
    labels = parse_labels(block, tasks).reshape(shape)
    weights = np.ones(len(logits))
    if weight is not None:
        weights = parse_weights(block, weight).astype(np.float64)
    texts = [_texts(block, name) for name in by]
    keys = pa.nulls(len(logits))
    if by:
        comma = pa.scalar(", ", pa.large_string())
        keys = pc.binary_join_element_wise(*texts, comma)
    return logits.reshape(shape), labels, weights, keys


def _texts(block: Block, name: str) -> pa.Array:
    """Returns the values of a column as text, those of dates as days."""
    array = block.column(name)
    dates = as_dates(plain(array))
    if dates is not None:
        return pc.fill_null(
            pc.strftime(dates, "%Y-%m-%d").cast(pa.large_string()), "none"
        )
    return pc.fill_null(as_text(block, name), "none")


def _by_task(rows: Judged, k: int, own: Metrics) -> dict[str, dict[str, Any]]:
    found = {}
    for task, name in enumerate(rows.tasks):
        scored, groups = rows.of_task(task)
        found[name] = quality_of(*scored) | measured(own, *scored)
        if groups is not None and len(groups):
            found[name] |= ranking_of(scored, groups, k)
    return found


def ranking_of(
    scored: Scored, groups: Int[np.ndarray, "N"], k: int
) -> dict[str, float | None]:
    """Returns GAUC and NDCG@k; None where no group has both labels, or a click."""
    order = np.argsort(scored.logits, kind="stable")
    logits, labels, weights = (x[order] for x in scored)
    gauc = by_value(Scores(logits, labels, weights, groups[order, None]), 0)
    rows = np.lexsort((-scored.logits, groups))  # by score within each group
    y, own = scored.labels[rows], groups[rows]
    starts = np.flatnonzero(np.diff(own, prepend=-1))
    sizes = np.diff(np.append(starts, len(own)))
    rank = np.arange(len(own)) - np.repeat(starts, sizes)
    worth = np.where(rank < k, 1 / np.log2(2.0 + rank), 0.0)
    clicks = np.add.reduceat(y, starts).astype(int)
    best = np.append(0.0, np.cumsum(1 / np.log2(2.0 + np.arange(k))))
    has_click = clicks > 0
    gained = np.add.reduceat(y * worth, starts)[has_click]
    ndcg = gained / best[np.minimum(clicks[has_click], k)]
    mean = float(ndcg.mean()) if has_click.any() else None
    return {"gauc": gauc["auc_within"], "ndcg": mean, "k": k}


def quality_of(
    logits: Float[np.ndarray, "N"],
    labels: Float[np.ndarray, "N"],
    weights: Float[np.ndarray, "N"],
) -> dict[str, Any]:
    """Returns the numbers of labelled rows, see `Evaluated`."""
    x, y = logits.astype(np.float64), labels.astype(np.float64)
    numbers: dict[str, Any] = {"rows": len(y), "clicks": int(y.sum())}
    total = weights.sum()
    if not total > 0:
        return numbers | dict.fromkeys(("auc", "logloss", "ne", "calibration"))
    losses = np.logaddexp(0.0, np.where(y == 1, -x, x))
    loss = float((weights * losses).sum() / total)
    half = _Z * float(np.sqrt(np.square(weights * (losses - loss)).sum()) / total)
    rate = float((weights * y).sum() / total)
    numbers |= {"auc": metrics.auc(logits, labels, weights)}
    numbers |= {"auc_half": auc_half(Scored(logits, labels, weights))}
    numbers |= {"logloss": loss, "logloss_half": half}
    if not 0 < rate < 1:
        return numbers | {"ne": None, "calibration": None}
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    ratio = float((weights * expit(x)).sum() / total) / rate
    error = np.sqrt(np.square(weights * (expit(x) - ratio * y)).sum()) / total
    return numbers | {
        "ne": float(loss / entropy),
        "ne_half": float(half / entropy),
        "calibration": ratio,
        "calibration_half": _Z * float(error / rate),
    }
