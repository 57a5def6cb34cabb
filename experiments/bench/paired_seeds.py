"""Trains a configuration in several recipes at the same seeds, and compares them.

    python experiments/bench/paired_seeds.py --config frappe_dlrm --seeds 5 \\
        --recipes bf16 fp8_tensorwise fp8_rowwise --out frappe_dlrm.json \\
        -- --data.path FOLDER

Runs of one seed share initial weights, dropout and the order of examples, so that
their difference is the recipe's. Options after `--` are passed to every run. An arm may
have options of its own, in quotes: `--recipes bf16 "bf16 --embedding.dtype bf16"`.
Prints and writes each arm's mean and spread, and its difference from the first arm with
the 95 % interval of the mean difference (Student's t over the pairs); the file is
written after every seed.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

import scipy.stats

from experiments.bench import result as results

METRICS = ("auc", "logloss", "ne", "calibration")
DISPATCH = "dispatch"  # an arm that is no recipe: the choices of this GPU's table


def train_once(
    config: str, arm: str, seed: int, extra: list[str], gpu: int | None = None
) -> dict:
    """Returns the summary of one run, trained in a separate process.

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
        return json.loads((workdir / "summary.json").read_text())


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


def compare(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """Returns, per arm and metric, the values, their spread, and the paired difference.

    Args:
        runs: summaries of each arm in the order of the seeds; the others are compared
            with the first arm.
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


def main() -> None:
    """Trains, compares, prints and writes."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    extra = arguments[split + 1 :]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--recipes", nargs="+", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--gpus", type=int, help="the seeds are dealt to")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    options = parser.parse_args(arguments[:split])
    runs: dict[str, list[dict]] = {recipe: [] for recipe in options.recipes}
    result = {}
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        jobs = []
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        for seed in seeds:
            gpu = None if options.gpus is None else seed % options.gpus
            for recipe in options.recipes:
                run = options.config, recipe, seed, extra, gpu
                jobs.append((recipe, pool.submit(train_once, *run)))
        for recipe, job in jobs:
            runs[recipe].append(job.result())
            if recipe == options.recipes[-1]:  # all of this seed are there
                result = summarize(runs, seeds)
                results.write(options.out, result)
    for arm, metrics in result["arms"].items():
        for name, metric in metrics.items():
            delta = metric["minus_first"]
            print(
                f"{arm:34} {name:12}{metric['mean']:.5f} +- {metric['std']:.5f}  "
                f"delta {delta['mean']:+.5f} +- {delta['half_interval_95'] or 0:.5f}"
            )


def summarize(runs: dict[str, list[dict]], seeds: range) -> dict:
    """Returns the result of the first of some seeds.

    Args:
        runs: summaries of each arm, in the order of the seeds.
        seeds: of the runs and of those to come.
    """
    first = next(iter(runs.values()))[0]
    return {
        "command": results.command(),
        "config": first["config"],
        "versions": first["versions"],
        "seeds": list(seeds[: len(next(iter(runs.values())))]),
        "split": first["final_split"],
        "steps": {r: [s["steps"] for s in rows] for r, rows in runs.items()},
        "seconds": {r: [s["seconds"] for s in rows] for r, rows in runs.items()},
        "skipped_steps": {
            r: [s["skipped_steps"] for s in rows] for r, rows in runs.items()
        },
        "fp8_sites": {r: rows[0]["sites"] for r, rows in runs.items()},
        "best_possible_ne": first["best_possible_ne"],
        "best_valid": {r: [s["best_valid"] for s in rows] for r, rows in runs.items()},
        "arms": compare(runs),
    }


if __name__ == "__main__":
    main()
