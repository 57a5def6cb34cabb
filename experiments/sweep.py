"""Searches the values of options with the lowest validation NE, by Optuna.

    pip install 'loka-jax[sweep]'
    python experiments/sweep.py --config table --data.path clicks.parquet \\
        --trials 20 --space optim.lr=1e-4:1e-2:log dropout-rate=0:0.3 embedding.dim=8,16

`--space` names options and what their values are drawn from: LOW:HIGH, LOW:HIGH:log, or
a list; the other options are those of train.py, and hold for every trial. A trial is a
process with a folder in `--workdir`, where `study.db` keeps what came of all. The same
command goes on after Ctrl-C, and helps where it is running already.

Exit codes: those of train.py. A trial that diverges or is refused does not end it.
"""

import sys

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()

import contextlib
import functools
import importlib.util
import operator
import pathlib
import re
import shlex
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from typing import Any

import filelock

from experiments.cli import parse, run_cli
from experiments.options import asks_for_help
from loka_jax import jsonfile
from loka_jax.commands import as_commands
from loka_jax.fitting import field_of
from loka_jax.options import Parser, option_of, require
from loka_jax.report.render import real
from loka_jax.terminal import printable
from loka_jax.train.config import Config
from loka_jax.train.folder.record import read_run

type Draw = Callable[[Any], list[str]]  # takes a trial; returns arguments


class Failed(Exception):
    """Why a trial has no validation NE."""


def objective(folder: pathlib.Path, line_of: Draw, trial: Any) -> float:
    """Trains as a trial asks, and returns its validation NE; raises Failed."""
    begun = trial.user_attrs.get("folder")
    workdir = folder / (begun or f"trial-{trial.number}")
    trial.set_user_attr("folder", workdir.name)
    line = [*line_of(trial), "--workdir", str(workdir), *["--resume"] * bool(begun)]
    try:
        _train(line, workdir.with_suffix(".txt"))
        return validation_ne(workdir)
    except Failed as failure:
        trial.set_user_attr("why", str(failure))
        raise
    except KeyboardInterrupt:
        put_back(trial.study, trial)
        raise


def put_back(study: Any, trial: Any) -> None:
    """Lets a later trial go on with one that was interrupted."""
    kept = {k: v for k, v in trial.user_attrs.items() if k == "folder"}
    study.enqueue_trial(trial.params, user_attrs=kept)


def draw_of(config: Config, entry: str) -> Draw:
    """Returns how the option of an entry of `--space` is drawn; raises ValueError."""
    name, _, text = entry.partition("=")
    option = option_of(field := field_of(config, name))
    default = operator.attrgetter(field)(config)
    low, _, high = text.removesuffix(":log").partition(":")
    is_whole = not isinstance(default, float) and (low + high).isdecimal()
    is_log, kind = text.endswith(":log"), int if is_whole else float

    def choose(trial: Any) -> list[str]:
        value = trial.suggest_categorical(option, text.split(","))
        if isinstance(default, bool):
            return [option if value == "True" else option.replace("--", "--no-", 1)]
        return [option, *value.split()]

    def draw(trial: Any) -> list[str]:
        suggest = trial.suggest_int if is_whole else trial.suggest_float
        return [option, str(suggest(option, kind(low), kind(high), log=is_log))]

    if ":" not in text and all(text.split(",")):
        return choose
    with contextlib.suppress(ValueError):
        if kind(low) < kind(high) and not (is_log and kind(low) <= 0):
            return draw
    raise ValueError(
        f"--space {entry!r} must be OPTION=LOW:HIGH or OPTION=LOW:HIGH:log with LOW < "
        "HIGH, above 0 for a logarithm, or OPTION=A,B,C."
    )


def _train(line: list[str], output: pathlib.Path) -> None:
    """Trains in a process, which saves if this one is interrupted; raises Failed."""
    command = [sys.executable, "-u", "-m", "loka_jax.commands", "train", *line]
    with open(output, "w", encoding="utf-8") as file:
        streams = {"stdout": file, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(command, **streams, start_new_session=True)
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise
    if code:
        end = {1: "failed", 2: "was refused"}.get(code, f"ended with code {code}")
        said = output.read_text("utf-8", "replace")
        found = re.findall(r"^(?:error:|│) (.*?)[ │]*$", said, re.MULTILINE)
        raise Failed(f"{end}: {found[0] if found else f'see {output}'}")


def validation_ne(workdir: pathlib.Path) -> float:
    """Returns the NE on validation rows of a run's final state; raises Failed."""
    run = read_run(workdir)
    step = run.summary.get("final_step")
    found = [real(line.get("ne")) for line in run.evals if line.get("step") == step]
    if not found or found[-1] is None:
        raise Failed("has no NE of validation rows.")
    return found[-1]


def open_study(folder: pathlib.Path, of: dict[str, Any]) -> Any:
    """Returns the study in a folder, or a new one; refuses one of something else."""
    if importlib.util.find_spec("optuna") is None:
        raise ValueError("a sweep needs Optuna: install loka-jax[sweep].")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder} ({error.strerror}): choose another --workdir."
        ) from None
    with filelock.FileLock(folder / ".lock"):
        kept = folder / "sweep.json"
        saved = jsonfile.read(kept) if kept.exists() else of
        if changed := jsonfile.explain_mismatch(saved, of):
            raise ValueError(
                f"{folder} holds a sweep with other options "
                f"({'; '.join(changed[:5])}): choose another --workdir."
            )
        jsonfile.write(kept, of)
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{folder / 'study.db'}",
            {"connect_args": {"timeout": 60}},
            heartbeat_interval=10,  # seconds; a trial without any is put back
            heartbeat_stale_trial_callback=put_back,
        )
        return optuna.create_study(
            storage=storage, study_name="sweep", load_if_exists=True
        )


def search(study: Any, objective: Callable[[Any], float], trials: int) -> None:
    """Runs trials until so many have ended, here or elsewhere; says what came."""
    from optuna.storages import fail_stale_trials

    def say(_, trial: Any) -> None:
        came = trial.user_attrs.get("why") or f"has validation NE {trial.value:.5f}"
        values = " ".join(f"{name} {value}" for name, value in trial.params.items())
        print(printable(f"Trial {trial.number}, {values}: {came}"), flush=True)

    def count(*states: str) -> int:  # those with a reason why they have no NE, too
        have = study.trials
        return sum(t.state.name in states or "why" in t.user_attrs for t in have)

    while count("COMPLETE") < trials:
        fail_stale_trials(study)
        if count("COMPLETE", "RUNNING") < trials:
            study.optimize(objective, 1, catch=Failed, callbacks=[say])
        else:
            time.sleep(1)


def _sweep(arguments: list[str]) -> int:
    parser = Parser(
        prog=as_commands("python experiments/sweep.py"),
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--space", nargs="+", default=[])
    parser.add_argument("--workdir", type=pathlib.Path)
    own, rest = parser.parse_known_args(arguments)
    if asks_for_help(rest):
        print(f"{as_commands(__doc__ or '')}\nOptions of every trial:\n")
    config = parse(rest, "sweep.py")
    if not own.space:
        raise ValueError("--space is missing: name options, as optim.lr=0.01:0.1.")
    require(own.trials >= 1, "--trials", own.trials, "at least 1")
    draws = [draw_of(config, entry) for entry in own.space]

    def line_of(trial: Any) -> list[str]:
        return [*rest, *(word for draw in draws for word in draw(trial))]

    folder = own.workdir or pathlib.Path("runs") / f"{config.name}-sweep"
    study = open_study(folder, {"config": config.identity(), "space": own.space})
    search(study, functools.partial(objective, folder, line_of), own.trials)
    if not any(trial.state.name == "COMPLETE" for trial in study.trials):
        raise ValueError(f"no trial has a validation NE: see the files in {folder}.")
    best = study.best_trial
    command = shlex.join(["python", "experiments/train.py", *line_of(best)])
    print(printable(f"Best: trial {best.number}, validation NE {best.value:.5f}, by"))
    print(f"  {as_commands(command)}")
    return 0


def main(arguments: list[str]) -> int:
    """Runs one command line and returns the exit code."""
    return run_cli(lambda: _sweep(arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
