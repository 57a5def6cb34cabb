"""Trains a configuration in several recipes at the same seeds, and compares them.

    python experiments/bench/paired_seeds.py --config frappe_dlrm --seeds 5 \\
        --recipes bf16 fp8_tensorwise fp8_rowwise --out frappe_dlrm.json \\
        -- --data.path FOLDER

Runs of one seed share initial weights, dropout and the order of examples, so that
their difference is the recipe's. Options after `--` are passed to every run. An arm may
have options of its own, in quotes: `--recipes bf16 "bf16 --embedding.dtype bf16"`. Runs
that take several GPUs each want `--jobs 1`: GPUs wait for each other in turns.
Prints and writes each arm's mean and spread, and its difference from the first arm with
the 95 % interval of the mean difference (Student's t over the pairs).

The file is written after every run. The same command trains only the runs that the file
lacks, so that it adds seeds, or ends a comparison that was interrupted. Differences are
those of the seeds that all arms have.
"""

import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import scipy.stats
import tyro

from experiments.bench import result as results
from loka_jax.recipe import get_recipe
from loka_jax.train.folder.record import read_run

METRICS = ("auc", "logloss", "ne", "calibration")
# Of the summary of a run: what is kept of each, and what all have alike.
_OF_A_RUN = ("final_eval", "steps", "seconds", "skipped_steps", "best_valid", "sites")
_OF_A_RUN += ("compile_seconds", "examples_per_second", "versions", "valid_ne")
_OF_A_RUN += ("commit", "kernels", "changes")
_OF_ALL = ("config", "final_split", "best_possible_ne")
DISPATCH = "dispatch"  # an arm that is no recipe: the choices of this GPU's table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Options of the benchmark.

    Attributes:
        config: to train.
        recipes: the arms: a recipe, or "dispatch", and options of that arm.
        out: where to write the JSON.
        seeds: their number.
        first_seed: the first of them.
        jobs: runs at a time.
        gpus: that the runs are dealt to; None leaves the environment as it is.
    """

    config: str
    recipes: tuple[str, ...]
    out: pathlib.Path
    seeds: int = 5
    first_seed: int = 0
    jobs: int = 1
    gpus: int | None = None


def train_once(
    config: str, arm: str, seed: int, extra: list[str], gpu: int | None = None
) -> dict:
    """Returns the summary of one run, trained in a separate process.

    Beside what `summary.json` has there are its origin and `valid_ne`: NE on the
    validation examples at each evaluation, by step.

    Args:
        config: to train.
        arm: the recipe of all sites, or `DISPATCH`; then options of this arm.
        seed: of the run.
        extra: further options.
        gpu: to train on, of which it takes only the memory that it needs; None leaves
            the environment as it is.

    Raises:
        RuntimeError: with the end of the output if the run failed.
    """
    made_by = results.origin()
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        arguments = ["--config", config, "--seed", str(seed)]
        recipe, *options = shlex.split(arm)
        if recipe == DISPATCH:
            arguments += ["--plan", "auto"]
        else:
            arguments += ["--recipe", recipe, "--plan", "off"]
        arguments += options
        command = [sys.executable, "experiments/train.py", *arguments, *extra]
        environment = dict(os.environ)
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        done = subprocess.run(
            [*command, "--workdir", str(workdir)],
            capture_output=True,
            text=True,
            env=environment,
        )
        if done.returncode:
            tail = (done.stdout + done.stderr)[-2000:]
            raise RuntimeError(f"{' '.join(command)} failed:\n{tail}")
        run = read_run(workdir)
        evals = [line for line in run.evals if line["split"] == "valid"]
        valid_ne = {line["step"]: line["ne"] for line in evals}
        return run.summary | made_by | {"valid_ne": valid_ne}


def describe(values: list[float]) -> dict[str, float]:
    """Returns mean and standard deviation (0 for a single value)."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.fmean(values), "std": spread}


def paired(values: list[float], base: list[float]) -> dict[str, float | None]:
    """Returns the mean difference of pairs, its spread and its 95 % half-interval."""
    difference = describe([a - b for a, b in zip(values, base, strict=True)])
    if len(values) == 1:
        return difference | {"half_interval_95": None}
    quantile = float(scipy.stats.t.ppf(0.975, len(values) - 1))
    half = quantile * difference["std"] / len(values) ** 0.5
    return difference | {"half_interval_95": half}


def compare(runs: Mapping[str, Sequence[dict]]) -> dict[str, dict]:
    """Returns, per arm and metric, the values, their spread, and the paired difference.

    Args:
        runs: of each arm in the order of the seeds; the others are compared with the
            first arm.
    """
    base = next(iter(runs.values()))
    table = {}
    for arm, summaries in runs.items():
        table[arm] = {}
        for metric in METRICS:
            values = [summary["final_eval"][metric] for summary in summaries]
            other = [summary["final_eval"][metric] for summary in base]
            table[arm][metric] = {
                "values": values,
                **describe(values),
                "minus_first": paired(values, other),
            }
    return table


def main(argv: list[str]) -> None:
    """Trains, compares, prints and writes."""
    split = argv.index("--") if "--" in argv else len(argv)
    extra = argv[split + 1 :]
    options = tyro.cli(Arguments, args=argv[:split], description=__doc__)
    for arm in options.recipes:
        recipe, *_ = shlex.split(arm)
        if recipe != DISPATCH:
            get_recipe(recipe)  # refuses what is none
    asked = {"config": options.config, "recipes": [*options.recipes], "extra": extra}
    result = earlier(options.out, asked)
    places: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for place in range(options.jobs):
        places.put(None if options.gpus is None else place % options.gpus)

    def train(arm: str, seed: int) -> dict:
        """Takes the place of the first run that ends, on whichever GPU that is."""
        gpu = places.get()
        try:
            return train_once(options.config, arm, seed, extra, gpu)
        finally:
            places.put(gpu)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        jobs = {
            pool.submit(train, arm, seed): (arm, seed)
            for seed, arm in itertools.product(seeds, options.recipes)
            if str(seed) not in result["runs"][arm]
        }
        failed = []
        try:
            for job in concurrent.futures.as_completed(jobs):
                if isinstance(error := job.exception(), RuntimeError):
                    failed.append(str(error))  # the other runs are kept
                    continue
                result = with_run(result, *jobs[job], job.result())
                results.write(options.out, result)
        except KeyboardInterrupt:  # it also ends the runs that have begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    show(result)
    if failed:
        raise RuntimeError("\n".join(failed))


def earlier(out: pathlib.Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Returns the result in a file, or one without runs if there is none.

    Raises:
        ValueError: if the runs in the file have other options.
    """
    if not out.exists():
        runs = {arm: {} for arm in asked["recipes"]}
        return {"command": results.command(), "arguments": asked, "runs": runs}
    result = json.loads(out.read_text())
    if (had := result.get("arguments")) != asked:
        raise ValueError(
            f"--out {out} has runs of {had}, not of {asked}: name another."
        )
    return result


def with_run(
    result: dict[str, Any], arm: str, seed: int, summary: dict[str, Any]
) -> dict[str, Any]:
    """Returns the result with another run; arms are compared over common seeds."""
    run = {name: summary[name] for name in _OF_A_RUN}
    runs = result["runs"] | {arm: result["runs"][arm] | {str(seed): run}}
    seeds = sorted(set.intersection(*(set(map(int, x)) for x in runs.values())))
    paired = {arm: [runs[arm][str(seed)] for seed in seeds] for arm in runs}
    about = {name: summary[name] for name in _OF_ALL}
    return {
        **{name: result[name] for name in ("command", "arguments")},
        **about,
        "seeds": seeds,
        **{
            name: {arm: [run[name] for run in rows] for arm, rows in paired.items()}
            for name in ("steps", "seconds", "skipped_steps", "best_valid")
        },
        "fp8_sites": {arm: rows[0]["sites"] for arm, rows in paired.items() if rows},
        "arms": compare(paired) if seeds else {},
        "runs": runs,
    }


def show(result: dict[str, Any]) -> None:
    """Prints each arm's metrics, and how they differ from those of the first."""
    for arm, metrics in result["arms"].items():
        for name, metric in metrics.items():
            delta = metric["minus_first"]
            print(
                f"{arm:34} {name:12}{metric['mean']:.5f} +- {metric['std']:.5f}  "
                f"delta {delta['mean']:+.5f} +- {delta['half_interval_95'] or 0:.5f}"
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
