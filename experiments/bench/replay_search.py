"""Replays searches of measured spaces: how few trials find a fast configuration.

    python -m experiments.bench.replay_search space.json --out replays.json \\
        --replays 1000 --trials 20 --earlier other_space.json

Each method chooses among the points of a file of `measure_space.py`; what it then
measures is the median of log lines drawn again from those of the point. Regret is the
share of the best speed that the fastest trial so far lacks, of medians. The score is
that of random search minus the method's regret over the former, a mean over trials.

    loka       `loka search`: predictions, and what trials teach
    earlier    the same, with the trials of other spaces
    planner    the predictions alone
    random     any untried point; all of them is what an exhaustive search takes
    tpe, tuned, gp
               Optuna: its default, TPE of three random trials and all axes at once, and
               its Gaussian process, which needs torch
"""

import dataclasses
import functools
import importlib.util
import pathlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tyro
from scipy import stats

from experiments.bench import result as results
from experiments.cli import run_cli
from loka_jax.search.history import Trial, read_trials
from loka_jax.search.proxy import judge, suggest

AT = (1, 5, 10, 20)  # trials
_REPEATED = 100  # suggestions that were tried, in a row, that end a search

type Choose = Callable[[Sequence[Trial]], int | None]  # from trials to the next point


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        space: the file of a measured space.
        earlier: files of other spaces.
        replays: of each method.
        trials: of a replay.
        methods: to replay.
    """

    space: tyro.conf.Positional[pathlib.Path]
    out: pathlib.Path | None = None
    earlier: tuple[pathlib.Path, ...] = ()
    replays: int = 1000
    trials: int = 20
    methods: tuple[str, ...] = ("random", "planner", "tpe", "tuned", "gp", "loka")


def by_loka(points: Sequence[Trial], earlier: Sequence[Sequence[Trial]]) -> Choose:
    """Returns the choice of `loka search`."""
    return lambda trials: suggest(points, trials, earlier)[0]


def by_planner(points: Sequence[Trial]) -> Choose:
    """Returns the choice of the fastest point by predictions alone, if it fits."""

    def rank(i: int) -> tuple[bool, float]:
        return points[i].memory_share > 1, -points[i].predicted

    order = sorted(range(len(points)), key=rank)
    return lambda trials: order[len(trials)] if len(trials) < len(order) else None


def by_chance(points: Sequence[Trial], rng: np.random.Generator) -> Choose:
    """Returns the choice of any point that was not tried."""
    order = rng.permutation(len(points))
    return lambda trials: int(order[len(trials)]) if len(trials) < len(order) else None


def by_optuna(points: Sequence[Trial], sampler: Any) -> Choose:
    """Returns the choice of a sampler of Optuna; what is no point costs no trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    places = {point.key: i for i, point in enumerate(points)}
    axes: dict[str, Any] = {
        axis: optuna.distributions.CategoricalDistribution(
            sorted({point.choices[axis] for point in points})
        )
        for axis in points[0].choices
    }
    asked: list[Any] = []

    def choose(trials: Sequence[Trial]) -> int | None:
        if asked:
            _tell(study, asked[-1], trials[-1])
        speeds = {trial.key: trial for trial in trials}
        for _ in range(_REPEATED):
            one = study.ask(axes)
            key = tuple(sorted(one.params.items()))
            if key in speeds:
                _tell(study, one, speeds[key])
            elif key in places:
                asked.append(one)
                return places[key]
            else:
                study.tell(one, state=optuna.trial.TrialState.FAIL)
        return None

    return choose


def _tell(study: Any, asked: Any, trial: Trial) -> None:
    from optuna.trial import TrialState

    if trial.is_ok:
        study.tell(asked, np.log(trial.speed))
    else:
        study.tell(asked, state=TrialState.FAIL)


def chooser(
    method: str, points: Sequence[Trial], earlier: Sequence[Sequence[Trial]], seed: int
) -> Choose:
    """Returns how a method chooses in a replay with some seed.

    Raises:
        ValueError: if there is none of that name.
    """
    if method == "random":
        return by_chance(points, np.random.default_rng(seed))
    own = {
        "loka": functools.partial(by_loka, points, ()),
        "earlier": functools.partial(by_loka, points, earlier),
        "planner": functools.partial(by_planner, points),
    }
    if method in own:
        return own[method]()
    import optuna

    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    of = optuna.samplers
    samplers: dict[str, Callable[[], Any]] = {
        "tpe": lambda: of.TPESampler(seed=seed),
        "tuned": lambda: of.TPESampler(
            seed=seed, n_startup_trials=3, multivariate=True, group=True
        ),
        "gp": lambda: of.GPSampler(seed=seed),
    }
    if method not in samplers:
        raise ValueError(f"--methods {method} must be of {', '.join(own | samplers)}.")
    return by_optuna(points, samplers[method]())


def replay(
    points: Sequence[Trial], choose: Choose, trials: int, rng: np.random.Generator
) -> list[Trial]:
    """Returns the trials of a search, whose speeds are drawn again."""
    done: list[Trial] = []
    while len(done) < trials and (chosen := choose(done)) is not None:
        point = points[chosen]
        rates = tuple(rng.choice(point.rates, len(point.rates))) if point.is_ok else ()
        done.append(dataclasses.replace(point, rates=rates))
    return done


def regrets(points: Sequence[Trial], done: Sequence[Trial], trials: int) -> np.ndarray:
    """Returns the regret after each trial; after the last one it stays."""
    true = {point.key: point.speed for point in points if point.is_ok}
    found, best = [], None
    for trial in done:
        if trial.is_ok and (best is None or trial.speed > best.speed):
            best = trial
        found.append(1.0 if best is None else 1 - true[best.key] / max(true.values()))
    return np.array((found + [found[-1]] * trials)[:trials])


def summary(of: np.ndarray, by_random: np.ndarray) -> dict[str, Any]:
    """Returns the regrets of a method after some trials, and its score.

    Args:
        of: regrets, [replays, trials].
        by_random: the mean regret of random search after each trial.
    """
    half = 1.96 * of.std(axis=0, ddof=1) / len(of) ** 0.5
    places = [n for n in AT if n <= of.shape[1]]
    return {
        "regret": {n: float(of[:, n - 1].mean()) for n in places},
        "half_interval_95": {n: float(half[n - 1]) for n in places},
        "within_3_percent": {n: float((of[:, n - 1] <= 0.03).mean()) for n in places},
        "score": float(np.mean(1 - of.mean(axis=0) / np.maximum(by_random, 1e-9))),
    }


def calibration(points: Sequence[Trial], done: Sequence[Trial]) -> dict[str, float]:
    """Returns how well what was learned of trials tells the speed of the others."""
    tried = {trial.key for trial in done}
    others = [point for point in points if point.is_ok and point.key not in tried]
    judged = judge(others, done)
    true = np.log([point.speed for point in others])
    off = np.abs(true - judged.speed) <= 1.96 * judged.spread
    rank = stats.spearmanr(true, judged.speed).statistic
    return {"rank_correlation": float(rank), "in_95_interval": float(off.mean())}


def main(options: Arguments) -> int:
    """Replays, prints and writes."""
    by_key = {trial.key: trial for trial in read_trials(options.space)}
    points = list(by_key.values())
    earlier = [read_trials(path) for path in options.earlier]
    methods = list(dict.fromkeys(["random", *options.methods]))
    if "gp" in methods and importlib.util.find_spec("torch") is None:
        methods.remove("gp")
        print("gp is left out: Optuna's Gaussian process needs torch.")
    result = results.head("replay_search", options) | {
        "points": len(points),
        "failed": sum(not point.is_ok for point in points),
        "methods": {},
    }
    by_random = np.ones(options.trials)
    for method in methods:
        rows, counts, told = [], [], []
        for seed in range(options.replays):
            rng = np.random.default_rng([seed, 1])
            choose = chooser(method, points, earlier, seed)
            done = replay(points, choose, options.trials, rng)
            rows.append(regrets(points, done, options.trials))
            counts.append(len(done))
            if method == "loka" and len(points) > len(done):
                told.append(calibration(points, done[:10]))
        if method == "random":
            by_random = np.mean(rows, axis=0)
        found: dict[str, Any] = summary(np.array(rows), by_random) | {
            "trials": float(np.mean(counts))
        }
        if told:
            found |= {k: float(np.mean([x[k] for x in told])) for k in told[0]}
        result["methods"][method] = found
        numbers = "  ".join(f"{n}: {x:.2%}" for n, x in found["regret"].items())
        print(f"{method:8} regret after {numbers}  score {found['score']:.3f}")
        results.write(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(lambda: main(tyro.cli(Arguments, description=__doc__))))
