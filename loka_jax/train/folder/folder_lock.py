"""One run at a time writes to a folder: a lock file with the process that holds it."""

import fcntl
import os
from pathlib import Path
from typing import IO

_LOCK = ".lock"


def lock(workdir: Path) -> IO[str]:
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


def _is_at(file: IO[str], path: Path) -> bool:
    """Returns whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def remove_unused(workdir: Path, folders: list[Path]) -> None:
    """Removes the folders that were made for a run, if only its lock is in them."""
    for folder in [path for path in workdir.iterdir() if path.is_dir()]:
        _remove_empty(folder)
    if [path.name for path in workdir.iterdir()] == [_LOCK]:
        (workdir / _LOCK).unlink()
        for folder in folders:
            _remove_empty(folder)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # something is in it
        pass
