"""Writes one page of training runs over one another.

    python experiments/compare.py runs/bf16-s0 runs/fp8-s0 --out compare.html

Names the folders of two runs or more; each is compared with the first one. The page
holds final metrics, paired differences with 95 % intervals, which are printed, too,
speed, curves, and what differs in the configurations.

An error that the user can mend ends with one sentence and exit code 2.
"""

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()

import dataclasses
import pathlib
import shlex
import sys
from collections import Counter

import tyro

from experiments.cli import run_cli
from experiments.options import parse_alone
from loka_jax.commands import as_commands
from loka_jax.report.compare_page import difference_lines, write_compare_page
from loka_jax.report.comparison import ComparedRun
from loka_jax.terminal import printable
from loka_jax.train.folder.record import read_run
from loka_jax.train.scores import read_scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Writes one page of training runs over one another.

    Attributes:
        runs: the folders of two runs or more.
        out: the page.
    """

    runs: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    out: pathlib.Path = pathlib.Path("compare.html")


def compare(folders: list[pathlib.Path], out: pathlib.Path, command: str) -> list[str]:
    """Writes the page of the runs in `folders` to `out`; returns what is printed.

    Args:
        folders: of the runs.
        out: the page.
        command: the command line, for the page.

    Raises:
        ValueError: if a folder holds no run, or one is given twice, or the runs have
            nothing in common, or `out` is no HTML file, or cannot be written.
    """
    paths = [folder.resolve() for folder in folders]
    if repeated := [path for path, count in Counter(paths).items() if count > 1]:
        raise ValueError(f"{repeated[0]} is named twice: name each run once.")
    if out.suffix != ".html":  # an older page is replaced, another file is not
        raise ValueError(f"--out {out} must end in .html: rename it.")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out} is in no folder that exists: create that first.")
    runs = [
        ComparedRun(name, read_run(path), read_scores(path))
        for name, path in zip(_names(paths), paths, strict=True)
    ]
    page = write_compare_page(out, runs, as_commands(command))
    return [*difference_lines(runs), f"Comparison: {page}"]


def _names(paths: list[pathlib.Path]) -> list[str]:
    """Returns the shortest ends of the paths that tell them apart."""
    for length in range(1, max((len(path.parts) for path in paths), default=1)):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def main(arguments: list[str]) -> int:
    """Runs one command line and returns the exit code."""
    line = shlex.join(["python", "experiments/compare.py", *arguments])

    def command() -> int:
        options = parse_alone(Arguments, arguments, "compare.py", __doc__)
        for text in compare([*options.runs], options.out, line):
            print(printable(text))
        return 0

    return run_cli(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
