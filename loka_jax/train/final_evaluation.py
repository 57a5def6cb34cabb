"""The final evaluation: the metrics of all examples, and a breakdown of a sample."""

from typing import Any, NamedTuple

import jax
import numpy as np

from loka_jax.data import Dataset, Position
from loka_jax.train.breakdown import Scores
from loka_jax.train.build import Evaluated, Run
from loka_jax.train.log_lines import chosen
from loka_jax.train.state import TrainState

SAMPLE = 1 << 18  # examples at most, but for those of one batch


class FinalEvaluation(NamedTuple):
    """The end of a run.

    Attributes:
        values: AUC, log loss, NE and calibration of all examples.
        sample: the scores of every so many batches; None if a logit is not finite, or
            there are several tasks.
    """

    values: dict[str, Any]
    sample: Scores | None


def evaluate_finally(run: Run, state: TrainState, dataset: Dataset) -> FinalEvaluation:
    """Returns the final evaluation of `state` on `dataset`."""
    evaluated = run.evaluate(state, dataset)
    sample = None
    values = evaluated.values
    if "tasks" not in values and values["non_finite"] == 0:
        sample = _sample(evaluated, dataset, run.config.loop.batch_size)
    return FinalEvaluation(chosen(values), sample)


def _sample(evaluated: Evaluated, dataset: Dataset, size: int) -> Scores:
    """Returns the scores of every so many batches, which are read again for ids."""
    stride = -(-len(evaluated.logits) // SAMPLE)
    steps = range(0, dataset.num_batches(size), stride)
    batches = (dataset.batch(Position(0, i, 0), size, shuffle=False) for i in steps)
    ids = np.concatenate(jax.device_get([batch.ids for batch in batches]))
    places = np.concatenate([np.arange(i * size, (i + 1) * size) for i in steps])
    weights = evaluated.weights[places]
    real = weights > 0  # not padding
    rows = places[real]
    return Scores(
        evaluated.logits[rows], evaluated.labels[rows], weights[real], ids[real]
    )
