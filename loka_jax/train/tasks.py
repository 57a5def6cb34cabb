"""Several tasks, one for each label column: their labels in a batch, their numbers.

    loss  = sum_t task_weight_t  sum_b w_bt loss_bt / sum_b w_bt
    w_bt  = the weight of example b, or 0 where it has no label of task t

B is the batch size, T the number of tasks. With a single task nothing has a dim T.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax.data import Batch
from loka_jax.optim import OptimConfig
from loka_jax.options import require
from loka_jax.train import metrics
from loka_jax.train.own_functions import Loss, Metrics, log_loss, loss_of, measured

_MEANS = ("auc", "logloss", "ne")


def check_tasks(names: tuple[str, ...], model: Any, optim: OptimConfig) -> None:
    """Raises ValueError if model or options are for other tasks than these."""
    of_model = getattr(model, "num_tasks", 1)
    if of_model != len(names):
        kind = type(model).__name__
        remedy = (
            f"set --num-tasks {len(names)}"
            if hasattr(model, "num_tasks")
            else "name one with --data.label, or use --config table --model mmoe"
        )
        raise ValueError(
            f"the data have {len(names)} labels ({', '.join(names)}), and the {kind} "
            f"predicts {of_model}: {remedy}."
        )
    weights, task = optim.task_weights, optim.best_task
    require(
        not weights or (len(weights) == len(names) > 1),
        "--optim.task-weights",
        weights,
        f"one weight for each of several labels, and there are {len(names)}",
    )
    require(
        task is None or (task in names and len(names) > 1),
        "--optim.best-task",
        task,
        f"one of several labels, and there are {', '.join(names)}",
    )


def labels_and_weights(batch: Batch) -> tuple[Array, Array]:
    """Returns float32 labels and weights, [B] of one task and [B, T] of several.

    Where a label is missing, both are 0.
    """
    return known(jnp.asarray(batch.labels), jnp.asarray(batch.weights))


def known(
    labels: Float[Array, "B"] | Float[Array, "B T"], weights: Float[Array, "B"]
) -> tuple[Array, Array]:
    """Returns labels and the weights of each, likewise."""
    if labels.ndim == 1:
        return labels, weights
    is_known = ~jnp.isnan(labels)
    return jnp.where(is_known, labels, 0.0), jnp.where(is_known, weights[:, None], 0.0)


class Objective(NamedTuple):
    """What training minimizes.

    Attributes:
        task_weights: of the losses of several tasks; 1 for each if empty.
        loss: of each example and task.
        tweo: weight of `nn.penalty` of the model's blocks; 0 for none.
    """

    task_weights: tuple[float, ...] = ()
    loss: Loss = log_loss
    tweo: float = 0.0


LOG_LOSS = Objective()


def objective_of(optim: OptimConfig) -> Objective:
    """Returns what a run minimizes."""
    return Objective(optim.task_weights, loss_of(optim.loss), optim.tweo)


def total_loss(
    losses: Float[Array, ""] | Float[Array, "T"], task_weights: tuple[float, ...]
) -> Float[Array, ""]:
    """Returns the sum of the tasks' losses, weighted if there are weights."""
    if losses.ndim == 0:
        return losses
    if task_weights:
        losses = losses * jnp.asarray(task_weights, losses.dtype)
    return jnp.sum(losses)


def evaluated(
    names: tuple[str, ...],
    seen: metrics.MetricState,
    logits: np.ndarray,
    labels: np.ndarray,
    weights: Float[np.ndarray, "N"],
    own: Metrics,
) -> dict[str, Any]:
    """Returns the numbers of an evaluation, see `by_task`; those of own metrics, too.

    Logits and labels are [N], or [N, T] of several tasks; a missing label is NaN.
    """
    numbers = {}
    for task, (name, part) in enumerate(
        zip(names, metrics.split_tasks(seen), strict=True)
    ):
        x, y = (values.reshape(len(values), -1)[:, task] for values in (logits, labels))
        is_known = ~np.isnan(y)
        x, y, w = x[is_known], y[is_known], weights[is_known]
        numbers[name] = {"auc": metrics.auc(x, y, w)} | metrics.compute(part)
        numbers[name] |= measured(own, x, y, w)
    return by_task(numbers)


def by_task(numbers: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of a single task as they are.

    Of several, AUC, log loss and NE are means over the tasks (None if one has none),
    all others None; each task's own numbers are under `tasks`, by name.
    """
    first, *others = numbers.values()
    if not others:
        return first
    means = {
        key: _mean([part[key] for part in numbers.values()]) if key in _MEANS else None
        for key in first
    }
    return means | {"tasks": dict(numbers)}


def select(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Returns some of an evaluation's numbers under new names, also of each task."""
    line = {new: values[old] for new, old in names.items()}
    if "tasks" in values:
        parts = values["tasks"].items()
        line["tasks"] = {task: select(part, names) for task, part in parts}
    return line


def _mean(values: list[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if len(present) == len(values) else None
