"""The final evaluation: the metrics of all examples, and a breakdown of a sample."""

from typing import Any, NamedTuple

import jax
import numpy as np

from loka_jax.data import Dataset, Position
from loka_jax.train.build import Run
from loka_jax.train.evaluation import Evaluated, evaluate
from loka_jax.train.logs.breakdown import Scores
from loka_jax.train.logs.log_lines import logged_metrics
from loka_jax.train.state import TrainState

SAMPLE = 1 << 18  # examples at most, but for those of one batch


class FinalEvaluation(NamedTuple):
    """The end of a run.

    Attributes:
        samples: the scores of every so many batches, by label, of the same examples;
            empty if a logit is not finite.
    """

    values: dict[str, Any]
    samples: dict[str, Scores]


def evaluate_finally(run: Run, state: TrainState, dataset: Dataset) -> FinalEvaluation:
    """Returns the final evaluation of `state` on `dataset`."""
    evaluated = evaluate(run, state, dataset)
    values, samples = evaluated.values, {}
    by_task = values.get("tasks", {"": values}).values()
    if all(part["non_finite"] == 0 for part in by_task):
        samples = _samples(evaluated, dataset, run.config.loop.batch_size)
    return FinalEvaluation(logged_metrics(values), samples)


def _samples(evaluated: Evaluated, dataset: Dataset, size: int) -> dict[str, Scores]:
    """Returns the scores of every so many batches, which are read again for ids."""
    stride = -(-len(evaluated.logits) // SAMPLE)
    steps = range(0, dataset.num_batches(size), stride)
    batches = (dataset.batch(Position(0, i, 0), size, shuffle=False) for i in steps)
    ids = np.concatenate(jax.device_get([batch.ids for batch in batches]))
    places = np.concatenate([np.arange(i * size, (i + 1) * size) for i in steps])
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
