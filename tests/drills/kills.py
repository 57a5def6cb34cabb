"""Kills training runs at random moments; what they end with must not change by a bit.

    python -m tests.drills.kills [--minutes 30] [--seeds 3] [--first-seed 0]

For every seed and model (DLRM and DCN V2, with Probe, a plan, a planted drift that
demotes a site, microbatches, early stopping's best state) one process trains to the
end. Then the same run is started again and again and killed after a random time, by
SIGKILL, SIGTERM or SIGINT, until it has ended; the leaves of its last checkpoint, its
log lines and its summary must equal those of the first. It prints a line for each run,
and exits with 1 at the first difference.
"""

import argparse
import dataclasses
import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import pytest

from loka_jax.train.config import Config, DispatchOptions, RunOptions
from loka_jax.train.session import train
from tests.support import train as support
from tests.support.configs import tiny
from tests.support.recorded import newest

MODELS = ("fp8_dlrm", "fp8_dcnv2")
_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# By a signal before the run handles it, or by the run after saving.
_STOPPED = {0, *(-number for number in _SIGNALS), *(128 + n for n in _SIGNALS)}
# What depends on when a run was killed.
_TIMES = (*support.MEASURED, "command", "config")


def config(model: str, seed: int, workdir: Path) -> Config:
    base = tiny(model)
    every = {"eval_every": 12, "save_every": 6, "log_every": 3}
    loop = dataclasses.replace(base.loop, microbatches=2, epochs=6, **every)
    return dataclasses.replace(
        base,
        seed=seed,
        loop=loop,
        optim=dataclasses.replace(base.optim, plateau_patience=50),
        probe=dataclasses.replace(base.probe, every=2),
        dispatch=DispatchOptions(rules=("*_mlp/*=fp8_tensorwise_delayed",)),
        run=RunOptions(workdir=workdir, resume=(workdir / "config.json").exists()),
    )


def run(model: str, seed: int, workdir: Path) -> int:
    """Trains in this process, with a drift at one site, and returns the exit code."""
    support.plant_drift(pytest.MonkeyPatch(), None, since=20, until=50)
    jax.config.update("jax_compilation_cache_dir", str(workdir.parent / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return train(config(model, seed, workdir), []).exit_code


def outcome(workdir: Path) -> dict[str, str]:
    """Returns what a finished run leaves behind, by name, without times."""
    logs = ("metrics.jsonl", "scales.jsonl", "amaxes.jsonl")
    found = {name: json.dumps(support.lines(workdir, name)) for name in logs}
    summary = support.without(_TIMES, support.summary(workdir))
    found["summary.json"] = json.dumps(summary, sort_keys=True)
    found["plan.json"] = (workdir / "plan.json").read_text()
    for name in ("checkpoints", "best"):
        saved, state = newest(workdir / name)
        found[name] = f"{saved.step} {support.digest(state)}"
    return found


def finish(model: str, seed: int, workdir: Path, longest=None, draw=None):
    """Trains to the end, killed after random times if `longest` seconds are given.

    Returns the outcome, the seconds of the last process and the number of kills.
    """
    kills = 0
    while True:
        began = time.monotonic()
        module = [sys.executable, "-m", "tests.drills.kills"]
        process = subprocess.Popen(
            [*module, "--run", model, str(seed), workdir],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            timeout = 600 if longest is None else draw.uniform(0.2, 1.0) * longest
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            assert draw is not None, "a run without a kill does not end"
            process.send_signal(draw.choice(_SIGNALS))
            kills += 1
            _, errors = process.communicate(timeout=120)
        if process.returncode not in _STOPPED:
            raise AssertionError(f"exit code {process.returncode}: {errors.decode()}")
        if process.returncode == 0:
            return outcome(workdir), time.monotonic() - began, kills


def drill(model: str, seed: int, folder: Path, deadline: float) -> tuple[int, int]:
    """Returns the numbers of runs and kills; raises AssertionError on a difference."""
    expected, _, _ = finish(model, seed, folder / f"{model}-{seed}-first")
    changes = json.loads(expected["summary.json"])["changes"]
    assert len(changes) == 2, f"a site was to leave FP8 and to return: {changes}"
    # Again, as programs are compiled now: kills are to fall into training.
    again, longest, _ = finish(model, seed, folder / f"{model}-{seed}-second")
    assert again == expected, "two runs without a kill differ"
    total, draw = 0, random.Random(seed)
    for attempt in itertools.count(1):
        workdir = folder / f"{model}-{seed}-{attempt}"
        found, _, kills = finish(model, seed, workdir, longest, draw)
        total += kills
        different = [name for name in expected if found[name] != expected[name]]
        assert not different, f"{workdir} differs in {', '.join(different)}"
        shutil.rmtree(workdir)
        if time.monotonic() > deadline:
            return attempt, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        model, seed, workdir = arguments.run
        return run(model, int(seed), Path(workdir))
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    pairs = [(model, seed) for seed in seeds for model in MODELS]
    began, share = time.monotonic(), 60 * arguments.minutes / len(pairs)
    # Kept where something was lost, so that it can be looked at.
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    for i, (model, seed) in enumerate(pairs):
        try:
            runs, kills = drill(model, seed, folder, began + (i + 1) * share)
        except AssertionError as error:
            print(f"{model}, seed {seed}: {error}")
            return 1
        print(f"{model}, seed {seed}: {runs} runs, {kills} kills, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
