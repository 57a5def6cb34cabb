"""Times as a function of work: non-negative factors, and what neighbours say.

    log time(x) = log(c_a . w(x)) + f(x) + g_a(x) + d + e_a + noise

for candidate a of a provider. The factors c_a are fitted by non-negative least squares
of relative errors, drawn to those of all candidates of the provider: alone, few
measurements make a launch free. f, which candidates share, and g_a are Gaussian
processes over `work.place`: near a measured problem a prediction is corrected by what
the factors got wrong there, for this candidate and for others; far from all it is not.
d and e_a, numbers, are what another device than that of the fit adds.

References:
    Rasmussen and Williams, "Gaussian Processes for Machine Learning", equations 2.25,
    2.26 and 4.17.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np
import scipy

LEAST_POINTS = 12  # fewer measurements of a candidate say nothing about other shapes
# Variances of log time: of what the factors get wrong in all candidates, in one, and
# of a measurement; the measurements that the factors of all count for in those of one;
# and the distance within which problems are alike. Chosen on the sites of an H200 by
# errors at shapes left out of the fit, noise and distance on half of these shapes.
_SHARED, _OWN, _NOISE = 0.06, 0.04, 0.004
_DRAW = 30.0
# Variances of what another device adds, to all candidates and to one.
_DEVICE, _DEVICE_OWN = 0.02, 0.0025
_REACH = 1.5
_LEAST_US = 0.1


class Prediction(NamedTuple):
    """The median of a time, and the standard deviation of its logarithm."""

    us: float
    spread: float


class Points(NamedTuple):
    """Problems of candidates, one a row.

    Attributes:
        works: `[points, parts]`, of `work.work`.
        places: `[points, dims]`, of `work.place`.
        kinds: `[points]`, the index of each point's candidate.
        is_other: `[points]`, whether on another device than that of the fit.
    """

    works: np.ndarray
    places: np.ndarray
    kinds: np.ndarray
    is_other: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Regression:
    """The fit of a provider's candidates in one pass.

    Attributes:
        times: `[points]`, microseconds.
        alike: `[kinds, kinds]`, correlations of g between candidates.
        factors: `[kinds, parts]` of each candidate.
    """

    points: Points
    times: np.ndarray
    alike: np.ndarray
    factors: np.ndarray

    def given(self, points: Points, times: np.ndarray) -> "Regression":
        """Returns the fit that knows other measurements, too; its factors stay."""
        both = zip(self.points, points, strict=True)
        return dataclasses.replace(
            self,
            points=Points(*map(np.concatenate, both)),
            times=np.concatenate([self.times, times]),
        )

    def predict(self, points: Points) -> list[Prediction]:
        """Returns the predictions for some problems."""
        near = self._covariances(points, self.points)
        log_us = self._log_factors(points) + near @ self._weights
        # L^-1 K, `[measured, points]`, whose squares are the variances explained.
        explained = scipy.linalg.solve_triangular(self._cholesky, near.T, lower=True)
        device = (_DEVICE + _DEVICE_OWN) * points.is_other
        variances = _SHARED + _OWN + device - np.sum(explained**2, axis=0)
        spreads = np.sqrt(np.maximum(variances, 0.0) + _NOISE)
        return [
            Prediction(float(us), float(spread))
            for us, spread in zip(np.exp(log_us), spreads, strict=True)
        ]

    @functools.cached_property
    def _cholesky(self) -> np.ndarray:
        noise = _NOISE * np.eye(len(self.times))
        return np.linalg.cholesky(self._covariances(self.points, self.points) + noise)

    @functools.cached_property
    def _weights(self) -> np.ndarray:
        wrong = np.log(self.times) - self._log_factors(self.points)
        return scipy.linalg.cho_solve((self._cholesky, True), wrong)

    def _log_factors(self, points: Points) -> np.ndarray:
        us = np.sum(points.works * self.factors[points.kinds], axis=1)
        return np.log(np.maximum(us, _LEAST_US))

    def _covariances(self, a: Points, b: Points) -> np.ndarray:
        """Returns those of all processes between problems."""
        alike = self.alike[np.ix_(a.kinds, b.kinds)]
        is_other = np.outer(a.is_other, b.is_other)
        # Matern's process of order 3/2, once differentiable: what kernels do at the
        # next size up is no smooth function.
        distances = 3**0.5 * scipy.spatial.distance.cdist(a.places, b.places) / _REACH
        near = (1 + distances) * np.exp(-distances) * (_SHARED + _OWN * alike)
        return near + is_other * (_DEVICE + _DEVICE_OWN * alike)


def fit(points: Points, times: np.ndarray, alike: np.ndarray) -> Regression:
    """Returns the fit of measurements; arguments as in `Regression`."""
    return Regression(points, times, alike, _factors(points, times))


def _factors(points: Points, times: np.ndarray) -> np.ndarray:
    """Returns the factors `[kinds, parts]` of each candidate."""
    relative = points.works / times[:, None]
    nnls = scipy.optimize.nnls
    of_all, _ = nnls(relative, np.ones(len(times)))
    # What a part contributes to a time, so that parts of all sizes are drawn alike.
    draw = np.diag(np.sqrt(_DRAW * np.mean(relative**2, axis=0)))
    factors = []
    for kind in range(points.kinds.max() + 1):
        own = relative[points.kinds == kind]
        targets = np.concatenate([np.ones(len(own)), draw @ of_all])
        factors.append(nnls(np.concatenate([own, draw]), targets)[0])
    return np.stack(factors)
