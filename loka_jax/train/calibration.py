"""Platt's calibration: a line from logits to logits, fitted after training.

    logit' = a logit + b,  a and b of the lowest log loss on the validation rows

Order and AUC stay as they are, as a is positive. Each label has a line of its own.
"""

import dataclasses

import numpy as np
from jaxtyping import Float

CALIBRATION = "calibration.json"  # in the folder of a run
_BOUNDS = (1e-2, 1e2), (-50.0, 50.0)  # of a and b


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The lines of T tasks."""

    a: tuple[float, ...]
    b: tuple[float, ...]

    def of(
        self, logits: Float[np.ndarray, "N"] | Float[np.ndarray, "N T"]
    ) -> Float[np.ndarray, "N"] | Float[np.ndarray, "N T"]:
        """Returns calibrated logits; an exported folder does the same, bit for bit."""
        a, b = (np.array(x, np.float32) for x in (self.a, self.b))
        return logits * a + b


def fitted(
    logits: Float[np.ndarray, "N"] | Float[np.ndarray, "N T"],
    labels: Float[np.ndarray, "N"] | Float[np.ndarray, "N T"],
    weights: Float[np.ndarray, "N"],
) -> Calibration:
    """Returns the calibration of scored rows; a missing label of several is NaN.

    The line of a task with one kind of label leaves logits as they are.
    """
    by_task = (x.reshape(len(weights), -1).T for x in (logits, labels))
    lines = (_line(x, y, weights) for x, y in zip(*by_task, strict=True))
    a, b = zip(*lines, strict=True)
    return Calibration(a, b)


def _line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    from scipy.optimize import minimize  # which few runs need

    is_known = ~np.isnan(y) & (weights > 0)
    x, y, w = (v[is_known].astype(np.float64) for v in (x, y, weights))
    if len({*y.tolist()}) < 2 or not np.isfinite(x).all():
        return 1.0, 0.0
    w = w / w.sum()

    def loss(line: np.ndarray) -> tuple[float, np.ndarray]:
        z = line[0] * x + line[1]
        error = w * (np.exp(-np.logaddexp(0.0, -z)) - y)
        value = (w * (np.logaddexp(0.0, z) - y * z)).sum()
        return float(value), np.array([(error * x).sum(), error.sum()])

    options = {"ftol": 1e-14, "gtol": 1e-8}
    found = minimize(loss, (1.0, 0.0), jac=True, bounds=_BOUNDS, options=options)
    return float(found.x[0]), float(found.x[1])
