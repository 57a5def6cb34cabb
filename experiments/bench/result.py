"""The JSON result of a benchmark: what every one records, and how it is written."""

import dataclasses
import pathlib
import shlex
import sys
from typing import Any

from experiments.bench.origin import origin
from loka_jax import jsonfile
from loka_jax.train.folder.record import versions


def head(benchmark: str, arguments: Any) -> dict[str, Any]:
    """Returns the name, command, options (but for files), versions and origin."""
    options = {
        name: None if isinstance(value, pathlib.Path) else value
        for name, value in dataclasses.asdict(arguments).items()
    }
    return {
        "benchmark": benchmark,
        "command": command(),
        "arguments": options,
        "versions": versions(),
        **origin(),
    }


def command() -> str:
    """Returns the command line of this process."""
    return shlex.join(["python", *sys.argv])


def write(out: pathlib.Path | None, result: dict[str, Any]) -> None:
    """Writes a result to a file, if one is given, with the commit and the kernels."""
    if out is not None:
        result = result | origin()
        jsonfile.write_text(out, jsonfile.dumps(result, indent=1) + "\n")
