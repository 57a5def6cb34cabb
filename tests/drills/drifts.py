"""Trains healthy runs, in which no site may leave FP8.

    python -m tests.drills.drifts fp8_dlrm fp8_dcnv2 frappe_dlrm=FILE criteo_dlrm=FILE

Each configuration, with `=FILE` on its data, trains `--steps` steps with delayed and
with current scaling. It writes JSON: for each run its looks, the sites that left FP8
and the sentences on scales, after each run those so far. The exit code is 1 if any site
did, or if a run had no look.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
from concurrent import futures
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.bench import result as results
from experiments.configs import get_config
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.config import Config, RunOptions
from loka_jax.train.folder.record import versions
from loka_jax.train.session import train

RECIPES = ("fp8_tensorwise_delayed_bf16_drhs", "fp8_tensorwise", "fp8_rowwise")


def config(name: str, recipe: str, workdir: Path, options) -> Config:
    name, _, path = name.partition("=")
    base, steps = get_config(name), options.steps
    data, size = base.data, options.batch_size or base.loop.batch_size
    if path:
        data = dataclasses.replace(data, path=path)
    if data.kind == "generated":
        data = dataclasses.replace(data, examples=size * steps)
    loop = {"batch_size": size, "epochs": steps, "max_steps": steps}
    loop |= {"eval_every": max(steps // 10, 1), "log_every": max(steps // 100, 1)}
    return dataclasses.replace(
        base,
        model=base.model.clone(recipe=recipe),
        data=data,
        loop=dataclasses.replace(base.loop, **loop),
        optim=dataclasses.replace(base.optim, plateau_patience=None),
        plan="off",  # the recipe at every site, however slow
        run=RunOptions(workdir=workdir),
    )


def trained(name: str, recipe: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains a run and returns what its looks have shown."""
    with tempfile.TemporaryDirectory() as folder:
        run = config(name, recipe, Path(folder), options)
        train(run, [], Console(stderr=True, quiet=True))
        summary = json.loads((Path(folder) / "summary.json").read_text())
        with Checkpoints(Path(folder) / "checkpoints", keep=1) as checkpoints:
            saved = checkpoints.newest()
    assert saved is not None
    sites = saved.meta["progress"]["drift"]
    return {
        "config": run.name,
        "recipe": run.model.recipe,
        "steps": summary["steps"],
        "ne": summary["final_eval"]["ne"],
        "looks": {path: site["looks"] for path, site in sites.items()},
        "changes": summary["changes"],
        "warnings": summary["warnings"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="+", metavar="NAME[=FILE]")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--out", type=Path, help="of the JSON; printed only without")
    options = parser.parse_args()
    pairs = itertools.product(options.configs, options.recipes)
    calls = [(name, recipe, options) for name, recipe in pairs]
    command = shlex.join(["python", "-m", "tests.drills.drifts", *sys.argv[1:]])
    runs = []
    # None may take most of a GPU's memory before the others start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(
        options.jobs, mp_context=context, max_tasks_per_child=1
    ) as pool:
        for done in futures.as_completed([pool.submit(trained, *x) for x in calls]):
            runs.append(done.result())
            print(json.dumps(runs[-1]), flush=True)
            result = {"command": command, "versions": versions(), "runs": runs}
            results.write(options.out, result)
    return int(any(run["changes"] or not run["looks"] for run in runs))


if __name__ == "__main__":
    sys.exit(main())
