"""Which pairs of columns say more of the label together than apart, and which parts.

Beside a logistic regression of the columns, each pair of values gets a weight, by one
step of Newton's method with an L2 l:

    w_ab = -sum g / (l + sum h),  g = p - y, h = p (1 - p) over training rows with a, b

A cross is chosen if these weights lower the log loss of the validation rows clearly: by
more than three standard errors of the paired differences, as one of many is lower by
chance. So is a part of a number or time, as a cross with itself. The best one is added
to the regression, and the others are judged anew, so that two which say the same are
not both chosen. That takes a fraction of a second a pair.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.special import expit

from loka_jax.data import Schema, Splits
from loka_jax.data.crosses import rows_of_all
from loka_jax.terminal import clip
from loka_jax.train import baselines
from loka_jax.train.baselines import Rows, labelled, log_loss

_MOST = 6  # crosses, each of which costs a lookup and an update
_COLUMNS = 30  # the pairs of which are looked at, those of the most values
_AGAIN = 12  # the best ones, that are judged anew
_ROWS = 1 << 18  # of a cross, at most
_SPARSE = 8  # rows for all pairs are this many times those seen, at most
_L2 = (3.0, 30.0, 300.0)
_ERRORS = 3.0


class _Side(NamedTuple):
    """Rows of a label, and what is predicted of them so far."""

    logits: Float[np.ndarray, "N"]
    labels: Float[np.ndarray, "N"]
    weights: Float[np.ndarray, "N"]


class _Cross(NamedTuple):
    """A pair of fields: the pairs of values of training rows, and those of the sides.

    Attributes:
        places: of each pair of a row among `values`, [N, H].
        shares: what each counts in its row, 0 where it is not among them.
    """

    name: str
    rows: int
    values: Int[np.ndarray, "V"]
    places: tuple[np.ndarray, ...]
    shares: tuple[np.ndarray, ...]


def choose_crosses(splits: Splits, say: Callable[[str], None]) -> tuple[str, ...]:
    """Returns the crosses that help most, as `EmbeddingConfig.crosses`, and says so."""
    schema = splits.train.schema
    if splits.folder is None or schema.user is not None or len(schema.fields) < 2:
        return ()
    chosen = _chosen(splits, _pairs(schema), (), _MOST)
    if chosen:
        names = ", ".join(clip(cross.name) for cross in chosen)
        say(f"Crosses, whose pairs of values have weights of their own: {names}")
    return tuple(f"{cross.name}={cross.rows}" for cross in chosen)


def choose_parts(splits: Splits, parts: Iterable[str]) -> set[str]:
    """Returns the categorical columns that say more beside those that are no parts."""
    schema = splits.train.schema
    places = [schema.categorical.index(name) for name in parts]
    pairs = [(x, x) for x in places if schema.vocab_sizes[x] > 2]
    chosen = _chosen(splits, pairs, places, len(pairs))
    return {cross.name[: len(cross.name) // 2] for cross in chosen}


def _chosen(
    splits: Splits, pairs: list[tuple[int, int]], without: Sequence[int], most: int
) -> list[_Cross]:
    """Returns the crosses that help beside a regression without some columns."""
    both, schema = (
        (
            baselines.sample(splits.train, baselines.ROWS),
            baselines.sample(splits.valid, baselines.JUDGED),
        ),
        splits.train.schema,
    )
    models = baselines.fit_regressions(splits.train, splits.valid, without)
    known, judges = both
    tasks = [
        (
            _Side(model.logits(known), *labelled(known, i)),
            _Side(model.logits(judges), *labelled(judges, i)),
        )
        for i, model in enumerate(models)
    ]
    left, chosen = _ranked((_cross(both, schema, *pair) for pair in pairs), tasks), []
    while left and len(chosen) < most:
        chosen.append(left[0])
        tasks = [_with(left[0], task) for task in tasks]
        left = _ranked(left[1:], tasks)
    return chosen


def _pairs(schema: Schema) -> list[tuple[int, int]]:
    """Returns the numbers of the fields of all crosses; lists come second."""
    sizes, single = schema.vocab_sizes, len(schema.categorical)
    most = sorted(sorted(range(len(sizes)), key=lambda f: -sizes[f])[:_COLUMNS])
    return [(a, b) for a, b in itertools.combinations(most, 2) if a < single]


def _ranked(crosses: Iterable[_Cross], tasks: list) -> list[_Cross]:
    """Returns the crosses that lower the loss clearly, those that do most first."""
    best: list[tuple[float, _Cross]] = []
    for cross in crosses:  # which take megabytes each
        gain = sum(_gain(cross, *task) for task in tasks)
        if gain > 0:
            best = sorted([*best, (gain, cross)], key=lambda x: -x[0])[:_AGAIN]
    return [cross for _, cross in best]


def _cross(both: tuple[Rows, Rows], schema: Schema, left: int, right: int) -> _Cross:
    codes, shares = zip(*(_codes(x, schema, left, right) for x in both), strict=True)
    values = np.unique(codes[0][shares[0] > 0])
    places = tuple(np.searchsorted(values, x).astype(np.int32) for x in codes)
    values = np.append(values, -1)  # of those that are not there
    is_there = (values[at] == x for at, x in zip(places, codes, strict=True))
    own = (
        np.where(a, x, 0).astype("f4") for a, x in zip(is_there, shares, strict=True)
    )
    return _Cross(
        f"{schema.fields[left]}*{schema.fields[right]}",
        _rows(len(values), schema.vocab_sizes[left], schema.vocab_sizes[right]),
        values,
        places,
        tuple(own),
    )


def _rows(pairs: int, left: int, right: int) -> int:
    """Returns the rows of a cross of which so many pairs were seen."""
    every = rows_of_all(left, right)
    if every <= min(_SPARSE * pairs, _ROWS):
        return max(every, 2)
    return min(2 ** int(np.ceil(np.log2(4 * pairs))), _ROWS)


def _codes(
    rows: Rows, schema: Schema, left: int, right: int
) -> tuple[Int[np.ndarray, "N H"], Float[np.ndarray, "N H"]]:
    """Returns a number for each pair of values of rows, and its share in its row."""
    first = np.cumsum([0, *schema.vocab_sizes])
    widths = (*(1 for _ in schema.categorical), *schema.slots)
    place = sum(widths[:right])
    a, b = rows.ids[:, [left]], rows.ids[:, place : place + widths[right]]
    is_known = (a > first[left]) & (b > first[right])
    shares = np.where(is_known, rows.shares[:, place : place + widths[right]], 0.0)
    return a * int(first[-1]) + b, shares


def _weights(cross: _Cross, side: _Side, l2: float) -> Float[np.ndarray, "V"]:
    """Returns the weight of each pair of values, by training rows."""
    at, shares = cross.places[0].ravel(), cross.shares[0]
    p = expit(side.logits)
    slopes = shares * (side.weights * (p - side.labels))[:, None]
    squares = shares**2 * (side.weights * p * (1 - p))[:, None]
    sums = (np.bincount(at, x.ravel(), len(cross.values)) for x in (slopes, squares))
    total, curvature = sums
    return -total / (curvature + l2)


def _added(cross: _Cross, weights: np.ndarray, side: int) -> Float[np.ndarray, "N"]:
    return (weights[cross.places[side]] * cross.shares[side]).sum(axis=1)


def _gain(cross: _Cross, known: _Side, judges: _Side) -> float:
    """Returns the least by which a cross lowers the mean log loss, or 0."""
    return max(0.0, *(_least(cross, known, judges, l2) for l2 in _L2))


def _least(cross: _Cross, known: _Side, judges: _Side, l2: float) -> float:
    logits = judges.logits + _added(cross, _weights(cross, known, l2), 1)
    before = log_loss(judges.logits, judges.labels)
    minus = judges.weights * (before - log_loss(logits, judges.labels))
    return float(minus.mean() - _ERRORS * minus.std() / np.sqrt(len(minus)))


def _with(cross: _Cross, task: tuple[_Side, _Side]) -> tuple[_Side, _Side]:
    """Returns the two sides with a cross in what is predicted."""
    l2 = max(_L2, key=lambda x: _least(cross, *task, x))
    weights = _weights(cross, task[0], l2)
    known, judges = (
        side._replace(logits=side.logits + _added(cross, weights, i))
        for i, side in enumerate(task)
    )
    return known, judges
