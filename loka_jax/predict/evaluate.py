"""The quality of a trained run on labelled rows of files, by columns, too.

    log loss     = sum w l / sum w
    NE           = log loss / H(mean label),  H(q) = -q log q - (1 - q) log(1 - q)
    calibration  = mean prediction / mean label

Intervals are of 95 %, normal, over rows; that of NE takes H as known.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Float
from scipy.special import expit

from loka_jax.data.blocks import BadRows, Block, pc
from loka_jax.data.encoding import as_text
from loka_jax.data.files import unchanged
from loka_jax.data.places import stamp_of
from loka_jax.data.values import Counts, parse_labels, parse_weights
from loka_jax.predict.files import as_texts, blocks_of, chosen_files
from loka_jax.predict.predictor import Predictor
from loka_jax.train import metrics

_Z = 1.959964  # of a 95 % interval
_GROUPS = 20  # of the most rows, that are told apart


class Evaluated(NamedTuple):
    """The quality of a run on rows.

    Attributes:
        overall: the numbers of each task, by its label: `rows`, `clicks`, `auc`,
            `logloss`, `ne`, each of the last two with `_half` its interval, and
            `calibration`; None where there is nothing to judge by.
        groups: the same of the values of the columns, those of most rows first.
    """

    overall: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, dict[str, Any]]]


def evaluate_files(
    predictor: Predictor,
    path: str | os.PathLike | Sequence[str],
    *,
    where: str | None = None,
    by: tuple[str, ...] = (),
) -> Evaluated:
    """Returns how good a run is on labelled rows.

    Args:
        path: files with the columns and the labels that the run was trained on, as of
            `score_file`. Of an event log they have the histories, too.
        where: which rows, as in "dt=2026-11-14"; None for all. The others of an event
            log are not judged, but are events of histories.
        by: one or two columns, whose values rows are told apart by.

    Raises:
        ValueError: one sentence with the file, the row or the column and the remedy.
    """
    paths, config = as_texts(path), predictor.encoding.config
    files, rule = chosen_files(config, paths, where)
    further = () if config.weight is None else (config.weight,)
    names = (*predictor.columns, *predictor.tasks, *further, *by)
    columns = tuple(dict.fromkeys(names))
    blocks = blocks_of(config, files, rule, columns, BadRows(config.max_bad_rows))
    parts = []
    with unchanged({file: stamp_of(file) for file in files}):
        for table, logits in predictor.with_logits(blocks, Counts(), judged=True):
            numbers = np.arange(1, len(logits) + 1)
            block = Block(table, numbers, ", ".join(paths))
            parts.append(_part(block, logits, predictor.tasks, config.weight, by))
    if not sum(len(part[0]) for part in parts):
        raise ValueError(f"{', '.join(paths)} has no rows: name a file that has some.")
    logits, labels, weights = (
        np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[:3]
    )
    names = predictor.tasks
    groups = {}
    if by:
        keys = pa.chunked_array([part[3] for part in parts])
        ranked = pc.value_counts(keys.combine_chunks())
        order = np.argsort(-np.asarray(ranked.field(1)), kind="stable")[:_GROUPS]
        for key in ranked.field(0).take(pa.array(order)):
            rows = np.asarray(pc.equal(keys, key).combine_chunks())
            groups[key.as_py()] = _by_task(
                names, logits[rows], labels[rows], weights[rows]
            )
    return Evaluated(_by_task(names, logits, labels, weights), groups)


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
    texts = [pc.fill_null(as_text(block, name), "none") for name in by]
    keys = pa.nulls(len(logits))
    if by:
        comma = pa.scalar(", ", pa.large_string())
        keys = pc.binary_join_element_wise(*texts, comma)
    return logits.reshape(shape), labels, weights, keys


def _by_task(
    names: tuple[str, ...], logits: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> dict[str, dict[str, Any]]:
    found = {}
    for task, name in enumerate(names):
        known = ~np.isnan(labels[:, task])
        rows = logits[known, task], labels[known, task], weights[known]
        found[name] = quality_of(*rows)
    return found


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
    numbers |= {"logloss": loss, "logloss_half": half}
    if not 0 < rate < 1:
        return numbers | {"ne": None, "calibration": None}
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    prediction = float((weights * expit(x)).sum() / total)
    ne = {"ne": float(loss / entropy), "ne_half": float(half / entropy)}
    return numbers | ne | {"calibration": prediction / rate}
