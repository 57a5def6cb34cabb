"""The evaluation of a state on a data set."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from loka_jax.data import Dataset, Position, Schema
from loka_jax.data.batch import ids_of_labels
from loka_jax.train import metrics, tasks
from loka_jax.train.build import Run
from loka_jax.train.calibration import Calibration, fitted
from loka_jax.train.own_functions import metrics_of
from loka_jax.train.processes import watchdog
from loka_jax.train.scores import Scores
from loka_jax.train.state import TrainState
from loka_jax.train.step import past_first_steps

SAMPLE = 1 << 18  # examples of a final evaluation that are kept, up to a batch more
_LOGGED = ("auc", "logloss", "ne", "calibration", "metrics")


class Evaluated(NamedTuple):
    """Every row of a data set, in order and with padding, and the metrics of all.

    Attributes:
        logits: float32; [N, T] of several tasks.
        labels: 0 or 1, of the same shape; NaN where one of several is missing.
        weights: 0 for padding.
        counts: rows of each batch.
    """

    logits: Float[np.ndarray, "N"] | Float[np.ndarray, "N T"]
    labels: Float[np.ndarray, "N"] | Float[np.ndarray, "N T"]
    weights: Float[np.ndarray, "N"]
    values: dict[str, Any]
    counts: tuple[int, ...]

    @property
    def losses(self) -> Float[np.ndarray, "n"]:
        """The log loss of each example times its weight, over all tasks; no padding."""
        weights = self.weights[self.weights > 0]
        logits, labels = (
            np.asarray(x[self.weights > 0], np.float64).reshape(len(weights), -1)
            for x in (self.logits, self.labels)
        )
        with np.errstate(invalid="ignore"):  # of logits that are not finite
            losses = np.logaddexp(0.0, logits) - np.nan_to_num(labels) * logits
        return weights * np.where(np.isnan(labels), 0.0, losses).sum(axis=1)


def evaluate(run: Run, state: TrainState, dataset: Dataset) -> Evaluated:
    """Returns logits and metrics of `state` on all of `dataset`, in order.

    Those of several tasks are means, with each task's own under `tasks`.

    Logits and labels stay on the device until the last batch, 12 bytes an example:
    fetching them batch by batch would stall it.
    """
    eval_step = run.eval_step(past_first_steps(run.planned, state))
    seen, scored = metrics.init_like(state.metrics), []
    for step in range(dataset.num_batches(run.config.loop.batch_size)):
        batch = run.read(dataset, step)
        seen, logits = eval_step(state, seen, batch)
        scored.append((logits, batch.labels, batch.weights))
        watchdog.alive()
    batches = run.fetched(scored)
    logits, labels, weights = map(np.concatenate, zip(*batches, strict=True))
    own = metrics_of(run.config.metrics)
    values = tasks.evaluated(dataset.schema.labels, seen, logits, labels, weights, own)
    counts = tuple(len(own) for *_, own in batches)
    return Evaluated(logits, labels, weights, values, counts)


def quality(run: Run, state: TrainState, dataset: Dataset) -> dict[str, Any]:
    """Returns AUC, log loss, NE and calibration of `state` on `dataset`.

    Those of several tasks are means, but for calibration, which is None; each task's
    own are under `tasks`, by name.
    """
    return logged(evaluate(run, state, dataset))


def held_out(run: Run, step: int) -> Dataset:
    """Returns the validation rows; of a stream in a step, the examples that come next.

    `step` is of the epoch, and 0 at the end of the run.
    """
    loop = run.config.loop
    if not run.config.data.stream or not step:
        return run.splits.valid
    every = loop.eval_every or run.steps_per_epoch
    return run.splits.ahead(step, every, loop.batch_size)


def evaluate_finally(
    run: Run,
    state: TrainState,
    dataset: Dataset,
    calibration: Calibration | None = None,
) -> tuple[dict[str, Any], dict[str, Scores]]:
    """Returns the `quality`, and by label the scores of every so many batches.

    With a calibration, that before it is under `uncalibrated`. There are no scores if a
    logit is not finite.
    """
    evaluated = evaluate(run, state, dataset)
    before = {}
    if calibration is not None:
        before = {"uncalibrated": logged(evaluated)}
        evaluated = _calibrated(run, evaluated, calibration, dataset.schema)
    by_task = evaluated.values.get("tasks", {"": evaluated.values}).values()
    if any(part["non_finite"] for part in by_task):
        return logged(evaluated) | before, {}
    size = run.config.loop.batch_size
    return logged(evaluated) | before, _sample(evaluated, dataset, size)


def calibration_of(run: Run, state: TrainState) -> Calibration:
    """Returns the calibration of a state by the validation rows."""
    found = evaluate(run, state, run.splits.valid)
    return fitted(found.logits, found.labels, found.weights)


def _calibrated(
    run: Run, evaluated: Evaluated, calibration: Calibration, schema: Schema
) -> Evaluated:
    """Returns the rows with calibrated logits, and the metrics of these."""
    logits, rows = calibration.of(evaluated.logits), evaluated[1:3]
    labels, weights = tasks.known(*map(jnp.asarray, rows))
    seen = metrics.init(weighted=schema.weighted, tasks=len(schema.labels))
    seen = metrics.update(seen, jnp.asarray(logits), labels, weights)
    own = metrics_of(run.config.metrics)
    values = tasks.evaluated(schema.labels, seen, logits, *rows, own)
    return evaluated._replace(logits=logits, values=values)


def logged(evaluated: Evaluated) -> dict[str, Any]:
    """Returns the `quality` of what was evaluated."""
    names = {name: name for name in _LOGGED if name in evaluated.values}
    return tasks.select(evaluated.values, names)


def _sample(evaluated: Evaluated, dataset: Dataset, size: int) -> dict[str, Scores]:
    """Returns the scores of every so many batches, which are read again for ids."""
    stride = -(-len(evaluated.logits) // SAMPLE)
    ids, places, first = [], [], 0
    for i, count in enumerate(evaluated.counts):
        if i % stride == 0:
            batch = dataset.batch(Position(0, i, 0), size, shuffle=False)
            ids.append(ids_of_labels(jax.device_get(batch)))
            places.append(np.arange(first, first + count))
        first += count
    ids, places = np.concatenate(ids), np.concatenate(places)
    weights = evaluated.weights[places]
    real = weights > 0  # not padding
    rows = places[real]
    logits, labels = (
        values[rows].reshape(len(rows), -1).T
        for values in (evaluated.logits, evaluated.labels)
    )
    return {
        name: Scores(x, y, weights[real], ids[real])
        for name, x, y in zip(dataset.schema.labels, logits, labels, strict=True)
    }
