"""What the mean and a logistic regression reach on the rows that judge a model.

    logit = b + u . x + sum_f w_f[id_f] + sum_g mean_j(w_g[id_gj])

x are the dense features, f the categorical and g the multi-valued columns:
one-hot ids, those of the model. The regression minimizes

    sum_i w_i log loss_i + ||s u||^2 / 2 + sum_f l_f / 2 ||w_f||^2

with the standard deviations s of x, by L-BFGS in float64. It takes seconds on a CPU,
whatever the training rows: a sample of them is used.

A user's weight wants another L2 than that of an hour. Those of the largest evidence,
the probability of the labels under weights drawn with variances 1 / l_f, are fixed
points (MacKay, "Bayesian Interpolation", 1992: 2 alpha E_W = gamma; here with the
diagonal h of the loss's Hessian):

    l_f = gamma_f / ||w_f||^2,   gamma_f = sum_j h_j / (h_j + l_f)

Where the validation rows are clearly against them, all fields have the one L2 of the
lowest log loss on these rows: the diagonal tells too little where columns nearly
determine the label.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import expit, logit

from loka_jax.data import Batch, Dataset, Position
from loka_jax.data.batch import ids_of_labels
from loka_jax.data.events import EventDataset
from loka_jax.ops.tables import TableSpec

ROWS = 1 << 18  # training rows that are used, at most
_VALUES = 1 << 22  # values in them, at most
JUDGED = 1 << 16  # validation rows that choose the L2, at most
_BLOCK = 1 << 13  # rows read at once
_SEQUENCES = 1 << 8  # likewise, with their histories
_L2 = (100.0, 30.0, 10.0, 3.0, 1.0, 0.3)
_DENSE_L2 = 1.0
_LEAST_L2, _MOST_L2 = 1e-2, 1e6
_ROUNDS = 12  # after which the loss hardly changes: L2s without evidence still grow
_ERRORS = 2.0  # standard errors of a mean difference, above which it is clear
_ITERATIONS = 100


class Rows(NamedTuple):
    """Rows of a split; n dense columns, S values in T columns of ids.

    Attributes:
        labels: 0 or 1; NaN where one of several is missing.
        ids: rows of the stacked tables, 0 where a list has no value.
        shares: what each value counts: 1, or that of a list's mean.
    """

    labels: Float[np.ndarray, "N T"]
    weights: Float[np.ndarray, "N"]
    dense: Float[np.ndarray, "N n"]
    ids: Int[np.ndarray, "N S"]
    shares: Float[np.ndarray, "N S"]


class Regression(NamedTuple):
    """The logistic regression of a task, and the mean label of its training rows."""

    mean: float
    bias: float
    dense: Float[np.ndarray, "n"]
    ids: Float[np.ndarray, "R"]

    def logits(self, rows: Rows) -> Float[np.ndarray, "N"]:
        """Returns the logits of rows."""
        by_value = (self.ids[rows.ids] * rows.shares).sum(axis=1)
        return self.bias + rows.dense @ self.dense + by_value


@dataclasses.dataclass(frozen=True, eq=False)
class Baselines:
    """The regression of each task on rows of a run, fitted once, when asked for."""

    train: Dataset
    valid: Dataset

    @functools.cached_property
    def regressions(self) -> tuple[Regression, ...]:
        """The regressions: see `fit_regressions`."""
        return fit_regressions(self.train, self.valid)


def fit_regressions(
    train: Dataset, valid: Dataset, without: Sequence[int] = ()
) -> tuple[Regression, ...]:
    """Returns the regression of each task: see the equations of this file.

    Args:
        without: places of categorical columns whose weights are 0.
    """
    known, judges = sample(train, ROWS), sample(valid, JUDGED)
    known.shares[:, list(without)] = 0.0
    tasks = range(known.labels.shape[1])
    return tuple(_fitted(known, judges, task, _spec(train)) for task in tasks)


def baseline_ne(
    regressions: tuple[Regression, ...], held_out: Dataset
) -> dict[str, float | None]:
    """Returns the NE of `mean` and `logistic_regression` on all of `held_out`.

    The mean is that of the training rows. NEs of several tasks are means over them;
    None where a task has only one kind of label.
    """
    losses = [_Losses() for _ in regressions]
    size = _block_of(held_out)
    for step in range(held_out.num_batches(size)):
        batch = held_out.batch(Position(0, step, 0), size, shuffle=False)
        rows = _rows_of(batch, held_out)
        for task, (loss, model) in enumerate(zip(losses, regressions, strict=True)):
            mean = np.full(len(rows.weights), logit(model.mean))
            loss.add(rows, task, {"mean": mean, "regression": model.logits(rows)})
    return {
        "mean": _mean_ne(losses, "mean"),
        "logistic_regression": _mean_ne(losses, "regression"),
    }


def logits_of(
    regressions: tuple[Regression, ...], dataset: Dataset
) -> Float[np.ndarray, "N T"]:
    """Returns the logits of all rows of a data set, in order."""
    parts = []
    for step in range(dataset.num_batches(_BLOCK)):
        batch = dataset.batch(Position(0, step, 0), _BLOCK, shuffle=False)
        rows = _rows_of(batch, dataset)
        parts.append(np.stack([x.logits(rows) for x in regressions], axis=1))
    return np.concatenate(parts)[: dataset.num_examples]


def _block_of(dataset: Dataset) -> int:
    """Returns how many examples are read at once."""
    if isinstance(dataset, EventDataset):
        return _SEQUENCES * dataset.devices
    return _BLOCK


def _spec(dataset: Dataset) -> TableSpec:
    """Returns how the rows of all tables are numbered."""
    schema = dataset.schema
    owners = schema.tables if schema.owners else ()
    return TableSpec(schema.table_rows, 1, owners=owners)


class _Losses:
    """The sums that NE is made of, for one task."""

    def __init__(self):
        self.weight, self.clicks = 0.0, 0.0
        self.loss = {"mean": 0.0, "regression": 0.0}

    def add(self, rows: Rows, task: int, logits: dict[str, np.ndarray]) -> None:
        labels, weights = labelled(rows, task)
        self.weight += float(weights.sum())
        self.clicks += float((weights * labels).sum())
        for name, values in logits.items():
            self.loss[name] += float((weights * log_loss(values, labels)).sum())

    def ne(self, name: str) -> float:
        """Returns log loss / H(mean label); NaN with one kind of label."""
        if not 0 < self.clicks < self.weight:
            return float("nan")
        rate = self.clicks / self.weight
        entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
        return float(self.loss[name] / self.weight / entropy)


def _mean_ne(losses: list[_Losses], name: str) -> float | None:
    mean = float(np.mean([loss.ne(name) for loss in losses]))
    return mean if np.isfinite(mean) else None


def log_loss(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the log loss of each example."""
    return np.logaddexp(0.0, logits) - labels * logits


def labelled(rows: Rows, task: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a task's labels and weights, both 0 where it has no label."""
    labels = rows.labels[:, task]
    lacks = np.isnan(labels)
    return np.where(lacks, 0.0, labels), np.where(lacks, 0.0, rows.weights)


def sample(dataset: Dataset, most: int) -> Rows:
    """Returns rows of a data set, drawn without replacement."""
    schema = dataset.schema
    width = len(schema.categorical) + sum(schema.slots)
    size = _block_of(dataset)
    count = min(dataset.num_examples, most, max(size, _VALUES // max(width, 1)))
    steps = range(-(-count // size))
    batches = (dataset.batch(Position(0, i, 0), size, shuffle=True) for i in steps)
    parts = zip(*(_rows_of(batch, dataset) for batch in batches), strict=True)
    return Rows(*map(np.concatenate, parts))


def _rows_of(batch: Batch, dataset: Dataset) -> Rows:
    schema, first = dataset.schema, np.array(_spec(dataset).offsets)
    if batch.events is not None:
        batch = _labelled_events(batch)
    single = len(first) - len(schema.multi)
    ids = [np.asarray(batch.ids, np.int64) + first[:single]]
    shares = [np.ones(ids[0].shape)]
    for field, bag in enumerate(batch.bags, start=single):
        values = np.asarray(bag.ids, np.int64)
        given = 1.0 if bag.weights is None else np.asarray(bag.weights, np.float64)
        share = np.where(values >= 0, given, 0.0)
        total = share.sum(axis=1, keepdims=True)
        shares.append(share / np.where(total > 0, total, 1.0))
        ids.append(np.where(values >= 0, values + first[field], 0))
    labels = np.asarray(batch.labels, np.float64)
    return Rows(
        labels.reshape(len(labels), -1),
        np.asarray(batch.weights, np.float64),
        np.asarray(batch.dense, np.float64),
        np.concatenate(ids, axis=1),
        np.concatenate(shares, axis=1),
    )


def _labelled_events(batch: Batch) -> Batch:
    """Returns the labelled events of a batch of an event log as examples apart."""
    real = np.asarray(batch.weights) > 0
    return Batch(
        dense=np.zeros((np.count_nonzero(real), 0), np.float32),
        ids=ids_of_labels(batch)[real],
        labels=batch.labels[real],
        weights=batch.weights[real],
    )


class _Fit:
    """The fit of a task's regression to rows, for some L2 after others."""

    def __init__(self, rows: Rows, task: int, tables: TableSpec):
        """Starts at the mean label."""
        self._labels, self._weights = labelled(rows, task)
        real = rows.dense[rows.weights > 0]
        self._center, scale = real.mean(axis=0), real.std(axis=0)
        self._scale = np.where(scale > 1e-6, scale, 1.0)  # 1 for constant columns
        total = float(self._weights.sum())
        mean = float((self._weights * self._labels).sum()) / max(total, 1e-12)
        self.mean = float(np.clip(mean, 1e-6, 1 - 1e-6))
        self._num_rows, self._num_dense = tables.total_rows, rows.dense.shape[1]
        present = rows.shares > 0
        self._used, column = np.unique(rows.ids[present], return_inverse=True)
        place = np.nonzero(present)[0], column
        shape = len(self._labels), len(self._used)
        one_hot = sparse.csr_matrix((rows.shares[present], place), shape)
        dense = sparse.csr_matrix((rows.dense - self._center) / self._scale)
        self._features = sparse.hstack([dense, one_hot], format="csr")
        self._transposed = self._features.T.tocsr()
        self._squares = self._transposed.power(2)
        squares = np.append(self._weights.sum(), self._squares @ self._weights)
        self._diagonal = self.mean * (1 - self.mean) * squares  # at the mean label
        num_weights = self._num_dense + len(self._used)
        self._solution = np.append(logit(self.mean), np.zeros(num_weights))
        starts = np.unique(tables.offsets)  # fields that share a table are one
        fields = np.searchsorted(starts, self._used, side="right")
        self._fields = np.append(np.zeros(self._num_dense, np.int64), fields)
        self.num_fields = len(starts)

    def at(self, by_field: Float[np.ndarray, "F"]) -> Regression:
        """Returns the regression of L2s, from where the last one ended."""
        l2 = self._by_weight(by_field)
        # Scaled by the Hessian's diagonal, a few iterations are enough.
        scale = 1 / np.sqrt(self._diagonal + np.append(1.0, l2))
        found = minimize(
            self._loss,
            self._solution / scale,
            (scale, l2),
            method="L-BFGS-B",
            jac=True,
            options={"maxiter": _ITERATIONS, "ftol": 1e-6},
        )
        self._solution = found.x * scale
        bias, dense, ids = np.split(self._solution, [1, 1 + self._num_dense])
        table = np.zeros(self._num_rows)
        table[self._used] = ids
        dense = dense / self._scale
        return Regression(
            self.mean, float(bias[0] - self._center @ dense), dense, table
        )

    def of_evidence(self, by_field: Float[np.ndarray, "F"]) -> Float[np.ndarray, "F"]:
        """Returns the next L2s: see the equations of this file."""
        weights = self._solution[1:]
        p = expit(self._features @ weights + self._solution[0])
        h = self._squares @ (self._weights * p * (1 - p))
        known = h / (h + self._by_weight(by_field))
        count = self.num_fields + 1
        gamma = np.bincount(self._fields, known, count)[1:]
        size = np.bincount(self._fields, np.square(weights), count)[1:]
        l2 = np.where(gamma > 0, gamma / np.maximum(size, 1e-12), by_field)
        return np.clip(l2, _LEAST_L2, _MOST_L2)

    def _by_weight(self, by_field: Float[np.ndarray, "F"]) -> Float[np.ndarray, "W"]:
        return np.append(_DENSE_L2, by_field)[self._fields]

    def _loss(
        self, scaled: np.ndarray, scale: np.ndarray, l2: np.ndarray
    ) -> tuple[float, np.ndarray]:
        solution = scaled * scale
        logits = self._features @ solution[1:] + solution[0]
        error = self._weights * (expit(logits) - self._labels)
        slope = np.append(error.sum(), self._transposed @ error + l2 * solution[1:])
        loss = (self._weights * log_loss(logits, self._labels)).sum()
        return float(loss + (l2 * np.square(solution[1:])).sum() / 2), slope * scale


def _fitted(rows: Rows, judges: Rows, task: int, tables: TableSpec) -> Regression:
    """Returns the regression of a task: see the equations of this file."""
    fit = _Fit(rows, task, tables)
    labels, weights = labelled(judges, task)

    def judged(model: Regression) -> np.ndarray:
        return weights * log_loss(model.logits(judges), labels)

    l2 = np.full(fit.num_fields, _L2[0])
    model = fit.at(l2)
    losses = judged(model)
    for value in _L2[1:]:
        other = fit.at(np.full_like(l2, value))
        if (judgement := judged(other)).sum() >= losses.sum():
            break
        l2[:], model, losses = value, other, judgement
    by_field = model
    for _ in range(_ROUNDS):
        by_field = fit.at(l2)
        l2 = fit.of_evidence(l2)
    minus = judged(by_field) - losses
    error = minus.std() / np.sqrt(len(minus))
    return model if minus.mean() > _ERRORS * error else by_field
