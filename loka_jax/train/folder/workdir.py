"""Which folder a run writes to."""

import pathlib

from loka_jax.train.config import Config
from loka_jax.train.processes.group import Processes, tell_workdir


def workdir_of(config: Config, processes: Processes) -> pathlib.Path:
    """Returns the workdir that the first process has chosen; the launcher hears it."""
    chosen = str(choose_workdir(config)) if processes.is_first else ""
    workdir = pathlib.Path(processes.same(chosen))
    if processes.is_first:
        tell_workdir(workdir)
    return workdir


def choose_workdir(config: Config) -> pathlib.Path:
    """Returns the workdir: that of `--workdir`, or one under runs/.

    Without `--workdir` every run gets a new folder, so that a command can be repeated;
    `--resume` then takes the newest of them.

    Raises:
        ValueError: if there is no run to resume.
    """
    if config.run.workdir is not None:
        return config.run.workdir
    recipe = config.model.recipe.replace("/", "+")  # of three names
    name = f"{config.name}-{recipe}-s{config.seed}"
    number = 1
    while (pathlib.Path("runs") / f"{name}-{number}").exists():
        number += 1
    if not config.run.resume:
        return pathlib.Path("runs") / f"{name}-{number}"
    if number == 1:
        raise ValueError(
            f"there is no run runs/{name}-1 to resume: leave out --resume, or name the "
            "run's folder with --workdir."
        )
    return pathlib.Path("runs") / f"{name}-{number - 1}"
