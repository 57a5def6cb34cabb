"""The JSON result of a benchmark: what every one records, and how it is written."""

import dataclasses
import pathlib
import shlex
import sys
from typing import Any

from loka_jax import jsonfile
from loka_jax.train.folder.record import versions


def head(benchmark: str, arguments: Any) -> dict[str, Any]:
    """Returns the name, command, options (but for files) and versions of a run."""
    options = {
        name: None if isinstance(value, pathlib.Path) else value
        for name, value in dataclasses.asdict(arguments).items()
    }
    return {
        "benchmark": benchmark,
        "command": command(),
        "arguments": options,
        "versions": versions(),
    }


def command() -> str:
    """Returns the command line of this process."""
    return shlex.join(["python", *sys.argv])


def write(out: pathlib.Path | None, result: dict[str, Any]) -> None:
    """Writes a result to a file, if one is given."""
    if out is not None:
        jsonfile.write_text(out, jsonfile.dumps(result, indent=1) + "\n")
