"""Trains at rising learning rates, and records where each form of a model diverges.

    python experiments/bench/divergence.py --out divergence.json --folder runs
    python experiments/bench/divergence.py --configs fp8_interformer_m --seeds 5 \\
        --forms pre_norm fog no_branch_norm no_qk_norm no_input_scale tanh tweo \\
        --recipes bf16 fp8_rowwise --out ablation.json --folder runs \\
        -- --loop.max-steps 20000

Forms are the options of FOG's layers (docs/histories.md): none, all, all but one, all
with the other bound; and TWEO's loss term alone. The rates are those of the dense
parameters, times each factor. Options after `--` are passed to every run.

Of each run there are the step of its last log line, whether its loss diverged there and
what was said, the NE of log lines and evaluations by step, and the alarms of Probe's
monitors (`--probe.every` after `--`): step, site, sentence. Its folder is kept. The
same command makes the runs that the file lacks.
"""

import dataclasses
import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import tyro

from experiments.bench import result as results
from experiments.configs import get_config
from loka_jax.train.folder.record import read_run

Form = Literal[
    "pre_norm",
    "fog",
    "no_branch_norm",
    "no_qk_norm",
    "no_input_scale",
    "tanh",
    "tweo",
]
_FAILED = 1  # the exit code of a run that diverged
_ALARM = re.compile(r"step ([\d,]+): (\S+): (.+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(results.Options):
    """Options of the benchmark.

    Attributes:
        folder: for the folders of the runs.
        configs: to train.
        forms: of their layers.
        recipes: of all sites.
        factors: of the configuration's learning rate.
        seeds: their number.
        jobs: runs at a time.
    """

    folder: pathlib.Path
    configs: tuple[str, ...] = ("fp8_hstu", "fp8_onetrans", "fp8_interformer")
    forms: tuple[Form, ...] = ("pre_norm", "fog")
    recipes: tuple[str, ...] = ("bf16", "fp8_tensorwise_delayed")
    factors: tuple[float, ...] = (1, 4, 16, 64)
    seeds: int = 1
    jobs: int = 1


type Case = tuple[int, str, str, Form, float]  # seed, config, recipe, form, factor


def options_of(config: str, form: Form) -> list[str]:
    """Returns the options of a form of the layers of a configuration."""
    if form in ("pre_norm", "tweo"):
        return ["--optim.tweo", "0.01"] if form == "tweo" else []
    stddev = get_config(config).embedding.init_stddev
    if stddev is None:
        raise ValueError(f"--configs {config} has no --embedding.init-stddev: set one.")
    parts = {
        "branch_norm": ["--branch-norm"],
        "qk_norm": ["--qk-norm", "tanh" if form == "tanh" else "rms"],
        "input_scale": ["--input-scale", str(1 / stddev)],
    }
    own = [part for name, part in parts.items() if form != f"no_{name}"]
    return list(itertools.chain(*own))


def run_once(case: Case, folder: pathlib.Path, extra: list[str]) -> dict[str, Any]:
    """Returns what became of a run, trained in a separate process.

    Raises:
        RuntimeError: with the end of the output if it failed for another reason.
    """
    seed, config, recipe, form, factor = case
    rate = factor * get_config(config).optim.lr
    workdir = folder / "-".join(map(str, case))
    command = [sys.executable, "experiments/train.py", "--config", config, "--plan"]
    command += ["off", "--seed", str(seed), "--recipe", recipe, "--optim.lr", str(rate)]
    command += [*options_of(config, form), *extra, "--workdir", str(workdir)]
    shutil.rmtree(workdir, ignore_errors=True)  # of a run that was interrupted
    done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip().rpartition("\n")[2]
    has_failed = done.returncode == _FAILED and said.startswith("error: ")
    if done.returncode and not has_failed:
        tail = (done.stdout + done.stderr)[-2000:]
        raise RuntimeError(f"{' '.join(command)} failed:\n{tail}")
    run = read_run(workdir)
    last = run.train[-1]["step"] if run.train else 0
    return {
        "case": case,
        "options": command[2:-2],
        "steps": last,
        "diverged_at": last if has_failed else None,
        "said": said if has_failed else None,
        "train_ne": {line["step"]: line["ne"] for line in run.train},
        "valid_ne": {x["step"]: x["ne"] for x in run.evals if x["split"] == "valid"},
        "alarms": alarms_in(done.stdout),
    }


def alarms_in(said: str) -> list[tuple[int, str, str]]:
    """Returns the step, site and sentence of each alarm that a run printed.

    A run that diverges writes no summary, which would have them.
    """
    found = filter(None, map(_ALARM.fullmatch, said.splitlines()))
    return [
        (int(step.replace(",", "")), site, text)
        for step, site, text in (x.groups() for x in found)
    ]


def main(arguments: Arguments, extra: list[str]) -> None:
    """Trains what the file lacks, prints and writes."""
    result = results.head("divergence", arguments) | {"extra": extra, "runs": []}
    if arguments.out is not None and arguments.out.exists():
        result["runs"] = json.loads(arguments.out.read_text())["runs"]
    known = [run["case"] for run in result["runs"]]
    a = arguments
    cases = itertools.product(range(a.seeds), a.configs, a.recipes, a.forms, a.factors)
    cases = [case for case in cases if [*case] not in known]
    with ThreadPoolExecutor(a.jobs) as pool:
        groups = itertools.batched(cases, a.jobs)
        for group in results.in_time(groups, result, arguments):
            for run in pool.map(lambda case: run_once(case, a.folder, extra), group):
                result["runs"].append(run)
                end = "ended well" if run["diverged_at"] is None else "diverged"
                print(*run["case"], end, "at step", run["steps"], flush=True)


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = tyro.cli(Arguments, args=sys.argv[1:split], description=__doc__)
    main(options, sys.argv[split + 1 :])
