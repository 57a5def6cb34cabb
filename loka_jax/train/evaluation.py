"""The evaluation of a state on a data set."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from loka_jax.data import Dataset
from loka_jax.train import metrics, tasks
from loka_jax.train.build import Run
from loka_jax.train.processes import watchdog
from loka_jax.train.state import TrainState
from loka_jax.train.step import past_first_steps


class Evaluated(NamedTuple):
    """Every row of a data set, in order and with padding, and the metrics of all.

    Attributes:
        values: the metrics.
        logits: float32; [N, T] of several tasks.
        labels: 0 or 1, of the same shape; NaN where one of several is missing.
        weights: 0 for padding.
    """

    values: dict[str, Any]
    logits: Float[np.ndarray, "N"] | Float[np.ndarray, "N T"]
    labels: Float[np.ndarray, "N"] | Float[np.ndarray, "N T"]
    weights: Float[np.ndarray, "N"]


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
    columns = zip(*run.fetched(scored), strict=True)
    rows = tuple(map(np.concatenate, columns))
    values = tasks.evaluated(dataset.schema.labels, seen, *rows)
    return Evaluated(values, *rows)
