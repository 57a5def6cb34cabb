"""Which columns a trained run lives on: by how much NE rises without their order.

    importance(c) = log loss with the values of column c in another order - log loss,
                    over H(mean label)

Each row keeps its other values, so that what a column says beside them is counted; of
columns that say the same, each may count for little. Intervals are of 95 %, over rows.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from loka_jax.data.blocks import BadRows, Block
from loka_jax.data.values import Counts, parse_labels
from loka_jax.predict.files import as_texts, blocks_of, chosen_files
from loka_jax.predict.predictor import Predictor

MOST_ROWS = 20_000  # the first ones
_Z = 1.959964  # of a 95 % interval


class Importance(NamedTuple):
    """The NE that a column brings, and half its interval."""

    column: str
    ne: float
    half: float


def importance_of(
    predictor: Predictor,
    path: str | os.PathLike | Sequence[str],
    *,
    where: str | None = None,
    seed: int = 0,
) -> list[Importance]:
    """Returns the importance of each column for the first label, the highest first.

    Args:
        path: labelled files, of which the first 20,000 rows are used.
        where: which rows, as in "dt=2026-11-14"; None for all.
        seed: of the other order.

    Raises:
        ValueError: for an event log, or rows of one kind of label.
    """
    config, label = predictor.encoding.config, predictor.tasks[:1]
    if config.is_log:
        raise ValueError(
            "importance is by rows in another order, which an event log must not have: "
            "leave out --importance."
        )
    paths = as_texts(path)
    files, rule = chosen_files(config, paths, where)
    names = tuple(dict.fromkeys((*predictor.columns, *label)))
    tables, count = [], 0
    for block in blocks_of(config, files, rule, names, BadRows(config.max_bad_rows)):
        tables.append(block.table.slice(0, MOST_ROWS - count))
        count += tables[-1].num_rows
        if count == MOST_ROWS:
            break
    table = pa.concat_tables(tables).combine_chunks()
    numbers = np.arange(1, count + 1)
    labels = parse_labels(Block(table, numbers, ", ".join(paths)), label).ravel()
    known = ~np.isnan(labels)
    rate = labels[known].mean() if known.any() else 0.0
    if not 0 < rate < 1:
        raise ValueError(
            f"{', '.join(paths)} has one kind of label, by which nothing is important: "
            "name rows with both."
        )
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)

    def losses(rows: pa.Table) -> np.ndarray:
        block = Block(rows, numbers, ", ".join(paths))
        found = predictor.with_logits([block], Counts())
        logits = np.concatenate([x for _, x in found]).reshape(count, -1)[known, 0]
        return np.logaddexp(0.0, np.where(labels[known] == 1, -logits, logits))

    before, order = losses(table), np.random.default_rng(seed).permutation(count)
    importances = []
    for group in _together(predictor):
        mixed = table
        for name in group:
            place = mixed.column_names.index(name)
            mixed = mixed.set_column(place, name, table[name].take(pa.array(order)))
        more = (losses(mixed) - before) / entropy
        half = _Z * float(more.std() / len(more) ** 0.5)
        importances.append(Importance(group[0], float(more.mean()), half))
    return sorted(importances, key=lambda x: -x.ne)


def _together(predictor: Predictor) -> list[tuple[str, ...]]:
    """Returns the columns, a list beside its weights."""
    weights = predictor.encoding.config.weights_of_multi
    names = (n for n in predictor.columns if n not in weights.values())
    return [(n, weights[n]) if n in weights else (n,) for n in names]
