"""Times as a function of work: non-negative factors, and what neighbours say.

    log time(x) = log(c . w(x)) + f(x) + noise

The factors c are fitted by non-negative least squares of relative errors. f is a
Gaussian process over `work.place`: near a measured problem a prediction is corrected by
what the factors got wrong there, far from all it is not.

References:
    Rasmussen and Williams, "Gaussian Processes for Machine Learning", equations 2.25
    and 2.26.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import nnls

LEAST_POINTS = 12  # fewer measurements say nothing about other shapes
# Variances of log time: of what the factors get wrong, and of one measurement. Chosen
# on the random sites of an H200, by errors at shapes left out of the fit.
_SIGNAL, _NOISE = 0.1, 0.002
_LEAST_US = 0.1


class Prediction(NamedTuple):
    """A predicted time.

    Attributes:
        us: microseconds, the median.
        spread: standard deviation of the logarithm: 0.1 is about 10 %.
    """

    us: float
    spread: float


class Regression:
    """The fit of one candidate in one pass."""

    def __init__(self, works: np.ndarray, places: np.ndarray, times: np.ndarray):
        """Fits the factors and the process.

        Args:
            works: `[points, parts]`, of `work.work`.
            places: `[points, dims]`, of `work.place`.
            times: `[points]`, microseconds.
        """
        self._places = places
        self._factors, _ = nnls(works / times[:, None], np.ones(len(times)))
        residuals = np.log(times) - self._log_factors(works)
        gram = _kernel(places, places) + _NOISE * np.eye(len(times))
        self._cholesky = cho_factor(gram)
        self._weights = cho_solve(self._cholesky, residuals)

    def predict(self, work: np.ndarray, place: np.ndarray) -> Prediction:
        """Returns the prediction for one problem."""
        near = _kernel(place[None], self._places)[0]
        log_us = self._log_factors(work[None])[0] + near @ self._weights
        explained = near @ cho_solve(self._cholesky, near)
        variance = max(_SIGNAL - explained, 0.0) + _NOISE
        return Prediction(float(np.exp(log_us)), float(np.sqrt(variance)))

    def _log_factors(self, works: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(works @ self._factors, _LEAST_US))


def _kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the covariances of f at places: squared exponential."""
    distances = np.sum((a[:, None] - b[None]) ** 2, axis=-1)
    return _SIGNAL * np.exp(-0.5 * distances)
