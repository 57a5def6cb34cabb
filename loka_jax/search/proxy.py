"""A proxy of training speed: what trials say of points that were not tried.

    log speed = log predicted + what earlier searches add + f(choices, shares of time)

f is a Gaussian process: a linear part, as most choices change speed by a factor, and a
smooth one for what they do together. So one trial corrects all predictions, and a part
of the step that is predicted badly is found out by the points where it is large.

    fits      logistic in the predicted share of memory
    runs      by the choice of a point that has failed most, but for memory
    gain      expected improvement of the logarithm over the best trial, times both
"""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from loka_jax.search.history import Case, Trial

LEAST_GAIN = 0.01  # of which a search expects less before it stops
LEAST_TRIALS = 10  # that it takes, whatever they say
_SURE = ((0.5, True), (2.0, False))  # shares of memory, and whether they fit
_EXPLORE_AFTER = 5  # trials with a speed: the next is where least is known
_LEAST_POINTS = 12  # by which the process itself is fitted: of fewer it is too sure
_RIDGE = 1.0


class Judged(NamedTuple):
    """What is thought of points, each an array over them.

    Attributes:
        speed: the logarithm of examples per second.
        spread: its standard deviation.
        works: the probability that a trial has a speed.
        gain: expected, of the logarithm.
    """

    speed: np.ndarray
    spread: np.ndarray
    works: np.ndarray
    gain: np.ndarray


def judge(
    cases: Sequence[Case],
    trials: Sequence[Trial],
    earlier: Sequence[Sequence[Trial]] = (),
) -> Judged:
    """Returns what is thought of the points of a space.

    Args:
        trials: of this space.
        earlier: of each other space, which teach what choices add to a prediction.
    """
    ok = [trial for trial in trials if trial.is_ok]
    both = [*cases, *ok]
    added = _added(both, earlier)
    features = _features(both)
    count = len(cases)
    off = np.array([trial.off for trial in ok]) - added[count:]
    mean, spread = _process(features[:count], features[count:], off)
    speed = np.log([case.predicted for case in cases]) + added[:count] + mean
    works = fits(cases, trials) * _runs(cases, trials)
    if not ok:
        return Judged(speed, spread, works, works * np.exp(speed - speed.max()))
    ahead = speed - max(math.log(trial.speed) for trial in ok)
    z = ahead / spread
    gain = spread * (z * stats.norm.cdf(z) + stats.norm.pdf(z))
    return Judged(speed, spread, works, works * gain)


def suggest(
    cases: Sequence[Case],
    trials: Sequence[Trial],
    earlier: Sequence[Sequence[Trial]] = (),
) -> tuple[int | None, Judged]:
    """Returns the index of the point to try next, and what is thought of all.

    None if all were tried, none is expected to gain enough, or all trials have failed.
    """
    judged = judge(cases, trials, earlier)
    tried = {trial.key for trial in trials}
    left = [i for i, case in enumerate(cases) if case.key not in tried]
    if not left:
        return None, judged
    ok = sum(trial.is_ok for trial in trials)
    likely = [i for i in left if judged.works[i] >= 0.5]
    if ok == _EXPLORE_AFTER and likely:
        return max(likely, key=lambda i: judged.spread[i]), judged
    best = max(left, key=lambda i: judged.gain[i])
    gains = ok and judged.gain[best] >= LEAST_GAIN
    if len(trials) >= LEAST_TRIALS and not gains:
        return None, judged
    return best, judged


def fits(cases: Sequence[Case], trials: Sequence[Trial]) -> np.ndarray:
    """Returns the probability that each point fits into memory."""
    from sklearn.linear_model import LogisticRegression

    shares = [case.memory_share for case in cases]
    if max(shares, default=0.0) < _SURE[0][0] and not _lacks_memory(trials):
        return np.ones(len(cases))
    ended = [x for x in trials if x.status in ("ok", "memory") and x.memory_share > 0]
    known = [*_SURE, *((trial.memory_share, trial.is_ok) for trial in ended)]
    x = np.log([[share] for share, _ in known])
    model = LogisticRegression(C=100.0).fit(x, [is_ok for _, is_ok in known])
    at = np.log(np.maximum(shares, 1e-9))[:, None]
    return model.predict_proba(at)[:, 1]


def factors(cases: Sequence[Case], judged: Judged) -> dict[str, dict[str, float]]:
    """Returns, by axis and value, the mean speed over that of the axis's fastest."""
    found: dict[str, dict[str, list[float]]] = {}
    for case, speed in zip(cases, judged.speed, strict=True):
        for axis, value in case.choices.items():
            found.setdefault(axis, {}).setdefault(value, []).append(speed)
    means = {
        axis: {value: float(np.mean(own)) for value, own in values.items()}
        for axis, values in found.items()
    }
    return {
        axis: {x: math.exp(mean - max(values.values())) for x, mean in values.items()}
        for axis, values in means.items()
    }


def _lacks_memory(trials: Sequence[Trial]) -> bool:
    return any(trial.status == "memory" for trial in trials)


def _runs(cases: Sequence[Case], trials: Sequence[Trial]) -> np.ndarray:
    """Returns the probability of each point that it neither crashes nor hangs.

    Each failure halves that of a choice which has never run.
    """
    ok, failed = Counter(), Counter()
    for trial in trials:
        if trial.status != "memory":
            (ok if trial.is_ok else failed).update(trial.key)
    shares = {x: (ok[x] + 2.0**-n) / (ok[x] + 1) for x, n in failed.items()}
    return np.array(
        [min((shares.get(x, 1.0) for x in case.key), default=1.0) for case in cases]
    )


def _described(case: Case) -> dict[str, float]:
    """Returns numbers by name: choices, and the shares of the parts of a step."""
    numbers = {}
    for axis, value in case.choices.items():
        try:
            numbers[axis] = math.log2(float(value))
        except ValueError:  # a word, or no positive number
            numbers[f"{axis}={value}"] = 1.0
    total = sum(case.us.values())
    return numbers | {f"{part}, share": us / total for part, us in case.us.items()}


def _features(cases: Sequence[Case]) -> np.ndarray:
    """Returns a row of numbers in -0.5..0.5 for each point."""
    rows = [_described(case) for case in cases]
    names = sorted({name for row in rows for name in row})
    x = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    low, high = x.min(axis=0), x.max(axis=0)
    varied = [*np.flatnonzero(high > low)] or [0]  # a space of one point has none
    return ((x - low) / np.where(high > low, high - low, 1.0) - 0.5)[:, varied]


def _process(
    at: np.ndarray, x: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and standard deviation of a Gaussian process at some points."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import (
        ConstantKernel,
        DotProduct,
        Matern,
        WhiteKernel,
    )

    linear = ConstantKernel(0.05, (0.01, 4.0)) * DotProduct(0.1, "fixed")
    smooth = ConstantKernel(0.01, (3e-3, 0.3)) * Matern(1.0, (0.5, 5.0), nu=2.5)
    optimizer: Any = "fmin_l_bfgs_b" if len(y) >= _LEAST_POINTS else None
    kernel = linear + smooth + WhiteKernel(3e-3, (1e-3, 0.1))
    model = GaussianProcessRegressor(kernel, optimizer=optimizer)
    center = float(np.mean(y)) if len(y) else 0.0
    if len(y):
        with warnings.catch_warnings():  # a bound of the kernel is as good as any
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(x, y - center)
    mean, spread = map(np.atleast_1d, model.predict(at, return_std=True))
    return mean + center, np.maximum(spread, 1e-6)


def _added(cases: Sequence[Case], earlier: Sequence[Sequence[Trial]]) -> np.ndarray:
    """Returns what earlier searches say that the choices of points add."""
    from sklearn.linear_model import Ridge

    spaces = [[trial for trial in space if trial.is_ok] for space in earlier]
    known = [trial for space in spaces for trial in space]
    if not known:
        return np.zeros(len(cases))
    off = [np.array([trial.off for trial in space]) for space in spaces if space]
    y = np.concatenate([own - own.mean() for own in off])  # one is slower as a whole
    features = _features([*cases, *known])
    model = Ridge(alpha=_RIDGE).fit(features[len(cases) :], y)
    return model.predict(features[: len(cases)])
