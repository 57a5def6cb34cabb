"""Judges a trained run by labelled rows of files.

    python experiments/evaluate.py --workdir runs/RUN --data.path day.parquet \\
        --by country

Prints AUC, log loss, NE and calibration, with 95 % intervals, of all rows, and of those
of each value of a column or two. An error that the user can mend ends with one sentence
and exit code 2.
"""

import dataclasses
import pathlib
import shlex
import sys

from experiments.options import run_alone
from experiments.predict import print_irregular
from loka_jax.commands import as_commands, leave_on_interrupt
from loka_jax.options import require_folder
from loka_jax.terminal import printable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The labelled rows.

    Attributes:
        path: files with the columns and labels of the run's training data: paths,
            folders, globs, or addresses of s3:// and gs://.
        where: which rows, as in "dt=2026-11-14"; None for all.
    """

    path: str | tuple[str, ...]
    where: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Judges a trained run by labelled rows of files.

    Attributes:
        workdir: the folder of the run.
        data: the rows.
        by: a column or two, whose values rows are told apart by; dates by days.
        within: a column whose values are groups of rows that were ranked, such as users
            or requests, for GAUC and NDCG; None for none.
        k: rows of a group that count for NDCG.
        importance: tells by how much NE rises if the values of each column are in
            another order, on the first 20,000 rows; on the run's page, too.
        out: a file for the numbers as JSON; None for none.
        page: a page (.html) of the numbers; None for none.
    """

    workdir: pathlib.Path
    data: Rows
    by: tuple[str, ...] = ()
    within: str | None = None
    k: int = 10
    importance: bool = False
    out: pathlib.Path | None = None
    page: pathlib.Path | None = None


def main(line: list[str]) -> int:
    """Runs one command line; returns the exit code."""
    command = as_commands(shlex.join(["python", "experiments/evaluate.py", *line]))
    return run_alone(
        Arguments, line, "evaluate.py", __doc__, lambda options: _run(options, command)
    )


def _run(arguments: Arguments, command: str) -> int:
    from loka_jax import jsonfile
    from loka_jax.predict import evaluate_files, importance_of, load
    from loka_jax.report.render import write_page
    from loka_jax.report.run_page import write_run_page
    from loka_jax.train.folder.record import IMPORTANCE, REPORT, read_run

    if arguments.page is not None and arguments.page.suffix != ".html":
        raise ValueError(f"--page {arguments.page} must end in .html: rename it.")
    require_folder("--page", arguments.page)
    require_folder("--out", arguments.out)
    predictor = load(arguments.workdir)
    how = "" if predictor.calibration is None else ", calibrated"
    print(f"Scoring with the weights of step {predictor.step:,}{how}.", flush=True)
    rows = arguments.data
    found = evaluate_files(
        *(predictor, rows.path),
        where=rows.where,
        by=arguments.by,
        within=arguments.within,
        k=arguments.k,
    )
    for name, numbers in found.overall.items():
        print(printable(f"{name}: {_in_words(numbers)}"))
    for value, tasks in found.groups.items():
        for name, numbers in tasks.items():
            place = value if len(tasks) == 1 else f"{value}, {name}"
            print(printable(f"  {place}: {_in_words(numbers)}"))
    print_irregular(found.irregular)
    numbers = found._asdict()
    if arguments.importance:
        ranked = importance_of(predictor, rows.path, where=rows.where)
        print("Importance: NE more with the values of a column in another order")
        for column, ne, half in ranked:
            print(printable(f"  {column}: {ne:+.5f} ± {half:.5f}"))
        numbers["importance"] = [one._asdict() for one in ranked]
        jsonfile.write(arguments.workdir / IMPORTANCE, numbers["importance"])
        page = write_run_page(arguments.workdir / REPORT, read_run(arguments.workdir))
        print(printable(f"Report: {page}"))
    if arguments.out is not None:
        jsonfile.write(arguments.out, numbers)
        print(printable(f"Numbers: {arguments.out}"))
    if arguments.page is not None:
        judged = {"": found.overall, **found.groups}
        view = {"judged": judged, "step": predictor.step, "by": arguments.by}
        view |= {"importance": numbers.get("importance"), "command": command}
        title = f"{arguments.workdir.resolve().name} on labelled rows"
        view |= {"title": title, "settings": {}}
        page = write_page(arguments.page, "evaluation.html", **view)
        print(printable(f"Page: {page}"))
    return 0


def _in_words(numbers: dict) -> str:
    def said(name: str, word: str, places: int = 5) -> str:
        value, half = numbers.get(name), numbers.get(f"{name}_half")
        if value is None:
            return f"{word} n/a"
        text = f"{word} {value:.{places}f}"
        return text if half is None else f"{text} ± {half:.{places}f}"

    parts = (
        said("auc", "AUC"),
        said("logloss", "log loss"),
        said("ne", "NE"),
        said("calibration", "calibration", 4),
    )
    ranks = ()
    if "gauc" in numbers:
        ranks = said("gauc", "GAUC"), said("ndcg", f"NDCG@{numbers['k']}")
    own = [f"{k} {x:.5f}" for k, x in numbers.get("metrics", {}).items()]
    counts = f"({numbers['rows']:,} rows, {numbers['clicks']:,} of label 1)"
    return "  ".join([*parts, *own, *ranks, counts])


if __name__ == "__main__":
    leave_on_interrupt()
    sys.exit(main(sys.argv[1:]))
