"""Surveys where in a model FP8 is safe and fast, on operands of its own training.

    python experiments/probe.py --config fp8_dlrm --workdir runs/probed

Trains, or continues the run in the workdir, while Probe observes every site; then
measures every candidate on operands drawn from the learned statistics, and writes
probe.json and probe.html into the workdir. Options are those of train.py, and
`--survey.*`.

Exit codes: those of train.py.
"""

import sys

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()

import dataclasses
import pathlib
import shlex

from experiments.cli import parse_with, run_cli
from loka_jax import jsonfile
from loka_jax.commands import as_commands
from loka_jax.jsonfile import as_dict
from loka_jax.report.survey_page import write_survey_page
from loka_jax.survey import SurveyConfig, survey
from loka_jax.train.config import Config
from loka_jax.train.folder import record
from loka_jax.train.folder.workdir import choose_workdir
from loka_jax.train.logs.printing import plain
from loka_jax.train.session import standard_output, train

_EVERY = 10  # steps from one observed step to the next, of a run that is long enough
_OBSERVED = 25  # steps of a shorter one; the survey warns below 20


def probe(config: Config, options: SurveyConfig, arguments: list[str]) -> int:
    """Trains, surveys and writes both files; returns the exit code."""
    console = standard_output()
    if max(config.mesh.replicas or 1, config.mesh.shards or 1) > 1:
        console.print("Probe runs on one device: --mesh.* is left out.")
    config = observed(config)
    done = train(config, arguments, console, script="probe.py")
    if done.exit_code or done.run is None:
        return done.exit_code
    assert done.workdir is not None and done.state is not None

    def say(sentence: str):
        console.print(plain(sentence))

    result = survey(done.run, done.state, options, say)
    command = shlex.join(["python", "experiments/probe.py", *arguments])
    result["command"] = as_commands(command)
    jsonfile.write(done.workdir / "probe.json", result)
    path = done.workdir / record.AMAXES
    amaxes = jsonfile.read_lines(path, say, max_bytes=jsonfile.MAX_LINES_BYTES)
    page = write_survey_page(done.workdir / "probe.html", result, amaxes)
    for warning in result["warnings"]:
        say(f"Too few statistics: {warning}")
    say(f"Survey: {page}")
    return 0


def observed(config: Config) -> Config:
    """Returns the config with Probe on, resuming the run in the workdir if any.

    It has one device, as the survey has.
    """
    workdir = choose_workdir(config)
    is_begun = (workdir / record.CONFIG).exists()
    run = dataclasses.replace(
        config.run, workdir=workdir, resume=config.run.resume or is_begun
    )
    probe = config.probe
    if not probe.every:
        every = _saved_every(workdir) if is_begun else _every(config)
        probe = dataclasses.replace(probe, every=every)
    mesh = dataclasses.replace(config.mesh, replicas=1, shards=1)
    return dataclasses.replace(config, run=run, probe=probe, mesh=mesh)


def _every(config: Config) -> int:
    """Returns the interval of observed steps by the length of a run, where known."""
    loop, steps = config.loop, config.loop.max_steps or _EVERY * _OBSERVED
    if config.data.is_generated:
        steps = min(steps, loop.epochs * config.data.examples // loop.batch_size)
    return max(1, min(_EVERY, steps // _OBSERVED))


def _saved_every(workdir: pathlib.Path) -> int:
    """Returns the option `--probe.every` of the run being resumed.

    Raises:
        ValueError: if it was not given: at most errors were measured.
    """
    every = as_dict(record.saved_config(workdir).get("probe")).get("every")
    if type(every) is int and every > 0:
        return every
    raise ValueError(
        f"{workdir} holds a run without statistics of its sites: choose another "
        "--workdir, or train with --probe.every 100."
    )


def main(arguments: list[str]) -> int:
    """Runs one command line and returns the exit code."""

    def command() -> int:
        config, options = parse_with(arguments, "probe.py", survey=SurveyConfig())
        return probe(config, options["survey"], arguments)

    return run_cli(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
