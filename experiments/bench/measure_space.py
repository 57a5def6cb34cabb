"""Measures the points of a search's space, in a random order, into a JSON that grows.

    python -m experiments.bench.measure_space --config fp8_dlrm --out space.json \\
        --space recipe mods table-dtype batch-size=4096,8192,16384 --budget-s 480

Options are those of search.py and train.py. The same command goes on where the last one
ended; `--gpus` deals the points to so many GPUs of a host, one each. A process takes
`--together` points, and begins none after `--budget-s` seconds. Failures are points,
too; what fails beside other `--jobs` is left to a command without them.
`replay_search.py` reads the file.
"""

import concurrent.futures
import itertools
import os
import pathlib
import random
import sys
import time
from collections.abc import Iterable

import jax

from experiments.bench import result as results
from experiments.cli import parse, run_cli
from experiments.plan import schema_of
from loka_jax.dispatch.pool import Turns
from loka_jax.fitting import changed
from loka_jax.options import Parser
from loka_jax.search.history import History, Trial
from loka_jax.search.predicted import Predictor
from loka_jax.search.space import Point, axes_of, points_of, with_mesh
from loka_jax.search.trial import measured, paced
from loka_jax.train.folder.record import versions

_GPU = "CUDA_VISIBLE_DEVICES"


def measure(
    groups: Iterable[list[Point]],
    predict: Predictor,
    history: History,
    seconds: float,
    environments: list[tuple[dict[str, str], str]],
    end: float,
) -> None:
    """Tries groups of points, each in a process, until the end of the budget.

    Args:
        seconds: that a trial may take.
        environments: variables, and the folder of its turns, of each process at a time.
    """
    left = iter(list(groups))
    shares = _shares([x.get(_GPU, "") for x, _ in environments])

    def work(environment: dict[str, str], turns: str) -> None:
        os.sched_setaffinity(0, shares[environment.get(_GPU, "")])  # children have it
        while time.monotonic() < end and (group := next(left, None)):
            cases = [predict(point) for point in group]
            pairs = zip(group, cases, strict=True)
            configs = [paced(point.config, case.step_us) for point, case in pairs]
            how = seconds, len(group), environment, turns
            outcomes = measured(configs, *how)
            for case, outcome in zip(cases, outcomes, strict=False):
                if turns and not outcome.rates:  # others may have had the memory
                    print(f"{case.choices}  left: {outcome.why}", flush=True)
                    continue
                trials = history.add(Trial(**(vars(case) | vars(outcome))))
                speed = f"{outcome.speed:,.0f}" if outcome.rates else outcome.why
                print(f"{len(trials)}  {case.choices}  {speed}", flush=True)
                if time.monotonic() > end:
                    break
            outcomes.close()

    with concurrent.futures.ThreadPoolExecutor(len(environments)) as pool:
        for job in [pool.submit(work, *own) for own in environments]:
            job.result()


def _shares(gpus: list[str]) -> dict[str, set[int]]:
    """Returns cores for each GPU's processes, which others do not disturb then."""
    cores, gpus = sorted(os.sched_getaffinity(0)), list(dict.fromkeys(gpus))
    each = max(len(cores) // len(gpus), 1)
    return {x: set(cores[i * each :][:each]) or set(cores) for i, x in enumerate(gpus)}


def measure_line(arguments: list[str]) -> int:
    """Measures as a command line asks, and returns the exit code."""
    parser = Parser(prog="measure_space", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--space", nargs="+", default=[])
    parser.add_argument("--budget-s", type=float, default=480.0)
    parser.add_argument("--trial-seconds", type=float, default=120.0)
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    own, rest = parser.parse_known_args(arguments)
    end = time.monotonic() + own.budget_s
    config, devices = parse(rest, "search.py"), 1
    if own.gpus is None:
        config, devices = with_mesh(config), jax.device_count()
    else:  # a process sees one of them
        config = changed(config, {"mesh.replicas": 1, "mesh.shards": 1})
    points, refused = points_of(config, axes_of(config, own.space, devices))
    about = {"config": config.identity(), "versions": versions()}
    history = History(own.out, about | {"commit": results.origin()["commit"]})
    tried = [trial.choices for trial in history.trials()]
    left = [point for point in points if point.choices not in tried]
    random.Random(0).shuffle(left)
    print(f"{len(points)} points, {len(left)} left; refused: {refused}", flush=True)
    visible = [{_GPU: str(i)} for i in range(own.gpus or 0)] or [{}]
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if own.jobs > 1 else {}
    turns = [Turns() for _ in visible] if own.jobs > 1 else []
    folders = [x.folder for x in turns] or [""] * len(visible)
    environments = [*zip((x | shared for x in visible), folders, strict=True)]
    groups = map(list, itertools.batched(left, own.together))
    predict = Predictor.here(schema_of(config))
    limit = own.trial_seconds * own.jobs  # others may take all turns before
    measure(groups, predict, history, limit, environments * own.jobs, end)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(lambda: measure_line(sys.argv[1:])))
