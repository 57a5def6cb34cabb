"""Which folder a run writes to, and the lock file by which no other run does."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterable
from typing import IO

from loka_jax.train.config import Config
from loka_jax.train.processes.group import Processes, tell_workdir

_LOCK = ".lock"  # holds the number of the process


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


def lock(workdir: pathlib.Path) -> IO[str]:
    """Returns the open lock file of `workdir`, held until closed.

    Raises:
        ValueError: if another run holds it, or it cannot be made.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(workdir / _LOCK, "a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot write to {workdir} ({error.strerror}): choose another --workdir."
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise ValueError(
            f"{workdir} is in use by another run (process {owner}): wait for it, or "
            "choose another --workdir."
        ) from None
    except OSError as error:
        file.close()
        raise ValueError(
            f"cannot lock {workdir} ({error.strerror}): choose a --workdir on a file "
            "system with file locks."
        ) from None
    if not _is_at(file, workdir / _LOCK):
        file.close()
        raise ValueError(
            f"{workdir} was removed by a run that ended just now: start again."
        )
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _is_at(file: IO[str], path: pathlib.Path) -> bool:
    """Returns whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def remove_unused(workdir: pathlib.Path, folders: list[pathlib.Path]) -> None:
    """Removes the folders that were made for a run, if only its lock is in them."""
    _remove_empty(path for path in workdir.iterdir() if path.is_dir())
    if [path.name for path in workdir.iterdir()] == [_LOCK]:
        (workdir / _LOCK).unlink()
        _remove_empty(folders)


def _remove_empty(folders: Iterable[pathlib.Path]) -> None:
    for folder in list(folders):
        with contextlib.suppress(OSError):  # something is in it
            folder.rmdir()
