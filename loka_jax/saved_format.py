"""Formats of what loka_jax saves to read again: which version wrote it?

A saved document holds the number of its format. The number is raised when a field is
added to the form, removed, or means something else; then what others wrote is refused
by one sentence, and not by the first field that does not fit.
"""

import pathlib
import re
from typing import Any

from loka_jax.terminal import clip

KEY = "format"  # of the number in config.json and in the manifest of a checkpoint
# A run: config.json and the checkpoints with their meta values. A run keeps its
# encoding as a folder of shards, so its number is raised with that of shards, too.
RUN = 18
SHARDS = 7  # a folder of shards: schema, settings, report and records
CHECKPOINTS = "checkpoints"  # of a run: a folder for each saved step, by its number


def why_not(number: object, reads: int) -> str | None:
    """Returns why a document is not read; None if it has the format that is.

    Args:
        number: the number in the document; None if it has none, as in early versions.
        reads: the number of the format that this version reads.
    """
    if number is not None and type(number) is not int:
        return f"its format is {clip(repr(number))}, not {reads}"
    if number == reads:
        return None
    which = "a later" if number is not None and number > reads else "an earlier"
    return f"{which} version of loka_jax wrote it"


def without_key(document: dict[str, Any]) -> dict[str, Any]:
    """Returns a document without the number of its format."""
    return {name: value for name, value in document.items() if name != KEY}


def require_run(path: pathlib.Path, number: object) -> None:
    """Raises ValueError unless a document of a run has the format that is read."""
    if (reason := why_not(number, RUN)) is not None:
        raise ValueError(
            f"{path} cannot be read ({reason}): train the run again, or use that "
            "version."
        )


def steps_in(checkpoints: pathlib.Path) -> list[int]:
    """Returns the steps in a folder of checkpoints, ignoring other files."""
    names = (path.name for path in checkpoints.iterdir())
    return [int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)]
