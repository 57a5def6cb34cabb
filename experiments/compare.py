"""Writes one page of training runs over one another.

    python experiments/compare.py runs/bf16-s0 runs/fp8-s0 --out compare.html

Names the folders of two runs or more; each is compared with the first one. The page
holds final metrics, paired differences with 95 % intervals, which are printed, too,
speed, curves, and what differs in the configurations. Runs that were evaluated on
different rows are scored again on the same ones with `--data.path`.

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
from loka_jax import jsonfile
from loka_jax.commands import as_commands
from loka_jax.options import require_folder
from loka_jax.report.compare_page import (
    as_numbers,
    difference_lines,
    write_compare_page,
)
from loka_jax.report.comparison import ComparedRun
from loka_jax.report.run_files import RunFiles
from loka_jax.terminal import printable
from loka_jax.train.folder.record import read_run
from loka_jax.train.scores import read_scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Labelled rows.

    Attributes:
        path: files with the columns and labels of the runs' training data: paths,
            folders, globs, or addresses of s3:// and gs://; None to compare the final
            evaluations.
        where: which rows, as in "dt=2026-11-14"; None for all.
    """

    path: str | tuple[str, ...] | None = None
    where: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Writes one page of training runs over one another.

    Attributes:
        runs: the folders of two runs or more.
        out: the page.
        json: a file for the differences, and for what differs in the configurations;
            None for none.
        data: labelled rows on which all are scored again, as runs must be that were
            evaluated on different ones.
    """

    runs: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    out: pathlib.Path = pathlib.Path("compare.html")
    json: pathlib.Path | None = None
    data: Rows = Rows()


def compare(options: Arguments, command: str) -> list[str]:
    """Writes the page of runs; returns what is printed.

    Args:
        options: what to compare.
        command: the command line, for the page.

    Raises:
        ValueError: if a folder holds no run or a damaged one, or one is given twice, or
            the runs have nothing in common, or `out` is no HTML file, or cannot be
            written.
    """
    paths = [folder.resolve() for folder in options.runs]
    out, rows = options.out, options.data
    if repeated := [path for path, count in Counter(paths).items() if count > 1]:
        raise ValueError(f"{repeated[0]} is named twice: name each run once.")
    if out.suffix != ".html":  # an older page is replaced, another file is not
        raise ValueError(f"--out {out} must end in .html: rename it.")
    require_folder("--out", out)
    require_folder("--json", options.json)
    if rows.path is None and rows.where is not None:
        raise ValueError("--data.where says which rows of --data.path: add that.")
    runs = [
        ComparedRun(name, _whole_run(path), read_scores(path))
        for name, path in zip(_names(paths), paths, strict=True)
    ]
    if rows.path is not None:
        runs = [
            _scored_again(run, path, rows)
            for run, path in zip(runs, paths, strict=True)
        ]
    page = write_compare_page(out, runs, as_commands(command))
    lines = [*difference_lines(runs), f"Comparison: {page}"]
    if options.json is not None:
        jsonfile.write(options.json, as_numbers(runs))
        lines.append(f"Numbers: {options.json}")
    return lines


def _whole_run(path: pathlib.Path) -> RunFiles:
    """Returns the contents of a run's files, of which none is damaged."""
    files = read_run(path)
    if files.damage:
        what = "; ".join(sentence.removesuffix(".") for sentence in files.damage)
        raise ValueError(
            f"{path} is damaged ({what}): restore its files, or leave the run out."
        )
    return files


def _scored_again(run: ComparedRun, path: pathlib.Path, rows: Rows) -> ComparedRun:
    """Returns a run with its scores of labelled rows of files."""
    from loka_jax.predict import as_texts, judged_rows, load

    assert rows.path is not None
    judged = judged_rows(load(path), rows.path, where=rows.where)
    scored = {name: judged.of_task(i)[0] for i, name in enumerate(judged.tasks)}
    if len(scored) == 1:  # whatever the label is called
        scored = {"": next(iter(scored.values()))}
    again = ", ".join(as_texts(rows.path)) + (f", {rows.where}" if rows.where else "")
    return run._replace(scored=scored, again=again)


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
        for text in compare(options, line):
            print(printable(text))
        return 0

    return run_cli(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
