"""Where in a model is FP8 safe, and where is it fast? Learned from its own training.

    python experiments/probe.py --config fp8_dlrm --workdir runs/probed

Trains, or goes on with what the workdir holds, while Probe observes every site; then
measures every candidate on operands drawn from what was learned, and writes probe.json
and probe.html into the workdir. Options are those of train.py, and `--survey.*`.

Exit codes: as of train.py.
"""

import dataclasses
import shlex
import sys

from experiments.cli import parse_survey, run_cli
from loka_jax.survey import SurveyConfig, survey, write_page
from loka_jax.train import jsonfile
from loka_jax.train.config import Config
from loka_jax.train.session import choose_workdir, standard_output, train

_EVERY = 10  # steps between observed ones, if the command line does not say


def probe(config: Config, options: SurveyConfig, arguments: list[str]) -> int:
    """Trains, surveys, writes both files; returns the exit code."""
    console = standard_output()
    config = _observed(config)
    done = train(config, arguments, console, script="probe.py")
    if done.exit_code or done.run is None:
        return done.exit_code
    assert done.workdir is not None and done.state is not None
    found = survey(done.run, done.state, options, console.print)
    found["command"] = shlex.join(["python", "experiments/probe.py", *arguments])
    jsonfile.write(done.workdir / "probe.json", found)
    page = write_page(done.workdir, found)
    for warning in found["warnings"]:
        console.print(f"Too few statistics: {warning}")
    console.print(f"Survey: {page}")
    return 0


def _observed(config: Config) -> Config:
    """Returns the run with Probe on, in a workdir that is gone on with if it exists."""
    if config.probe.every is None:
        observed = dataclasses.replace(config.probe, every=_EVERY)
        config = dataclasses.replace(config, probe=observed)
    workdir = choose_workdir(config)
    resume = config.run.resume or (workdir / "config.json").exists()
    run = dataclasses.replace(config.run, workdir=workdir, resume=resume)
    return dataclasses.replace(config, run=run)


def main(argv: list[str] | None = None) -> int:
    """Does as the command line says and returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return run_cli(lambda: probe(*parse_survey(arguments), arguments))


if __name__ == "__main__":
    sys.exit(main())
