"""Where a run's checkpoints are: a folder for each step, named by its number."""

import re
from pathlib import Path

CHECKPOINTS = "checkpoints"  # the folder of them all, in the workdir


def latest_step(directory: Path) -> int | None:
    """Returns the newest step, its content not verified; None if there is none."""
    return max(steps_in(directory), default=None) if directory.is_dir() else None


def steps_in(directory: Path) -> list[int]:
    """Returns the steps of a folder of checkpoints; other names are none of them."""
    names = (path.name for path in directory.iterdir())
    return [int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)]
