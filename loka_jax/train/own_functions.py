"""A loss and metrics of a user's own: functions of a file, which a run keeps by name.

    losses = loss(logits, labels, weights)     jax, [B] or [B, T] each, 0 for padding
    number = metric(scores, labels, weights)   NumPy, [N] each, of one label

The run weights the losses, takes their mean by label, and adds the labels'. Scores are
probabilities. Both are tried on a few rows before training.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from loka_jax import named
from loka_jax.terminal import one_line
from loka_jax.train.metrics import probabilities

type Loss = Callable[[Array, Array, Array], Array]
type Metrics = Mapping[str, Callable[..., float]]
_KIND = "function"


def log_loss(logits: Array, labels: Array, weights: Array) -> Array:
    """Returns the log loss of each example."""
    del weights
    return optax.sigmoid_binary_cross_entropy(logits, labels)


def loss_of(name: str | None) -> Loss:
    """Returns the loss of "module:function"; the log loss of None."""
    if name is None:
        return log_loss
    return named.found("the loss", name, callable, _KIND)


def metrics_of(entries: tuple[str, ...]) -> Metrics:
    """Returns the functions of entries NAME=module:function, by name."""
    found = {}
    for entry in entries:
        name, _, function = entry.partition("=")
        if not (name and function) or name in found:
            raise ValueError(
                f"--metrics {entry} must be NAME=module:function, each name once."
            )
        found[name] = named.found(f"the metric {name}", function, callable, _KIND)
    return found


def require_functions(loss: str | None, metrics: tuple[str, ...]) -> None:
    """Raises ValueError if a loss or a metric cannot be found; calls none."""
    loss_of(loss)
    metrics_of(metrics)


def check_functions(loss: str | None, metrics: tuple[str, ...], tasks: int) -> None:
    """Tries a loss and metrics on a few rows.

    Raises:
        ValueError: one sentence, if one cannot be called or returns something else.
    """
    rows = (-1.0, 1.0, 0.0, 0.0), (0, 1, 0, 1), (1, 1, 1, 1)
    logits, labels, weights = (np.array(x, np.float32) for x in rows)
    measured(metrics_of(metrics), logits, labels, weights)
    if loss is None:
        return
    function, shape = loss_of(loss), (4,) if tasks == 1 else (4, tasks)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    try:
        found = jax.eval_shape(function, x, x, x).shape
    except Exception as error:  # a user's function may raise any kind
        found = one_line(error)
    if found != shape:
        raise ValueError(
            f"the loss {loss} of logits, labels and weights of {shape} gives {found}: "
            "let it return the loss of each logit, by operations of jax."
        )


def measured(
    metrics: Metrics,
    logits: Float[np.ndarray, "N"],
    labels: Float[np.ndarray, "N"],
    weights: Float[np.ndarray, "N"],
) -> dict[str, Any]:
    """Returns the numbers of metrics, under `metrics`; nothing if there are none.

    Rows of weight 0 are padding.
    """
    real = weights > 0
    rows = probabilities(logits[real]), labels[real], weights[real]
    rows = tuple(x.astype(np.float64) for x in rows)
    numbers = {}
    for name, metric in metrics.items():
        try:
            numbers[name] = float(metric(*rows))
        except Exception as error:  # likewise
            raise ValueError(
                f"the metric {name} fails on {real.sum():,} rows ({one_line(error)}): "
                "let it return a number for any rows, NaN for none."
            ) from None
    return {"metrics": numbers} if numbers else {}
