"""A loss and metrics of a user's own, in a file that can be imported."""

import jax.numpy as jnp
import numpy as np


def focal(logits, labels, weights):
    """Returns the log loss, less of it where a row is easy."""
    p = 1 / (1 + jnp.exp(-jnp.where(labels == 1, logits, -logits)))
    return -jnp.log(p) * (1 - p) ** 2


def mean(logits, labels, weights):
    """Returns one number, which is no loss of each row."""
    return logits.mean()


def brier(scores, labels, weights):
    """Returns the mean square of the error."""
    return np.average((scores - labels) ** 2, weights=weights)


def broken(scores, labels, weights):
    """Fails."""
    raise KeyError("no such row")
