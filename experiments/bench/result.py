"""What benchmarks share: two options, what a result records, how it is written."""

import dataclasses
import functools
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from loka_jax import jsonfile
from loka_jax.dispatch import sources
from loka_jax.train.folder.record import versions

_ROOT = pathlib.Path(__file__).parents[2]
_BEGUN = time.perf_counter()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark.

    Attributes:
        out: where to write the JSON, after every case; printed only if None.
        budget_s: begin no case after that many seconds.
    """

    out: pathlib.Path | None = None
    budget_s: float | None = None


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
    return shlex.join(["python", *sys.orig_argv[1:]])  # with -m, if it was so begun


def in_time[T](
    cases: Iterable[T], result: dict[str, Any], options: Options
) -> Iterator[T]:
    """Yields cases until the budget is spent, and writes the result after each."""
    for case in cases:
        seconds = time.perf_counter() - _BEGUN
        if options.budget_s is not None and seconds > options.budget_s:
            result["stopped_before"] = str(case)
            print(f"stopped before {case}: {seconds:.0f} s are over the budget")
            return
        yield case
        result["seconds"] = time.perf_counter() - _BEGUN
        write(options.out, result)


def write(out: pathlib.Path | None, result: dict[str, Any]) -> None:
    """Writes a result to a file, if one is given, with the commit and the kernels."""
    if out is not None:
        result = result | origin()
        jsonfile.write_text(out, jsonfile.dumps(result, indent=1) + "\n")


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
