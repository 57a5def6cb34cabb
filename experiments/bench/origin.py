"""The commit and the kernels that made a result; uses no device."""

import functools
import pathlib
import subprocess

from loka_jax.dispatch import sources

_ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def origin() -> dict[str, str | None]:
    """Returns the commit and the kernels' digest, as they are at the first call."""
    return {"commit": commit(), "kernels": sources.digest()}


def commit(root: pathlib.Path = _ROOT) -> str | None:
    """Returns the commit of a working tree, or None outside of a repository.

    It ends in "-dirty" if a file differs from it, or is not in it. Results do not
    count, which are written while others are measured.

    Args:
        root: the folder of the working tree.
    """
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", ".", ":!experiments/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def _git(root: pathlib.Path, *command: str) -> str:
    """Returns what git says.

    Raises:
        OSError: if there is no git.
        subprocess.CalledProcessError: if the folder is in no repository.
    """
    git = subprocess.run(
        ("git", "-C", str(root), *command), check=True, capture_output=True, text=True
    )
    return git.stdout.strip()
