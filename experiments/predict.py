"""Scores the rows of files with a trained run.

    python experiments/predict.py --workdir runs/csv_dlrm-... --data.path new.csv \\
        --out scores.parquet --data.keys user item

Writes the key columns and `score`, the click probability, for every row in its order.
Labels are not needed. Of an event log the rows without a label are scored, on the
earlier events of their users. An error that the user can mend ends with one sentence
and exit code 2, and leaves no file.
"""

import dataclasses
import pathlib
import sys
from typing import Literal

from experiments.options import run_alone
from loka_jax.commands import leave_on_interrupt
from loka_jax.terminal import KIND_WORDS, printable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows to score.

    Attributes:
        path: files with the feature columns of the run's training data: CSV, TSV (.gz
            too), Parquet, or Criteo's format if the run was trained on that. Paths,
            folders, globs, or addresses of s3:// and gs://.
        where: which rows, as in "dt=2026-11-14"; None for all.
        keys: columns to copy to the output, such as a user and an item.
    """

    path: str | tuple[str, ...]
    where: str | None = None
    keys: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """The GPUs to score on.

    Attributes:
        shards: GPUs over which the rows of the tables are spread, a power of two; for
            tables that one GPU does not hold. The run may have had another number.
    """

    shards: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Scores the rows of files with a trained run.

    Attributes:
        workdir: the folder of the run.
        data: the rows.
        out: the new file, .parquet or .csv.
        plan: "saved" runs each site as in training; "off" runs all by XLA in the
            model's recipe, on machines that lack the kernels of the saved plan.
        mesh: the GPUs.
    """

    workdir: pathlib.Path
    data: Rows
    out: pathlib.Path
    plan: Literal["saved", "off"] = "saved"
    mesh: Devices = Devices()


def main(line: list[str]) -> int:
    """Runs one command line; returns the exit code."""
    return run_alone(Arguments, line, "predict.py", __doc__, _run)


def _run(arguments: Arguments) -> int:
    from loka_jax.predict import load, score_file

    shards = arguments.mesh.shards
    predictor = load(arguments.workdir, plan=arguments.plan, shards=shards)
    how = "" if predictor.calibration is None else ", calibrated"
    print(f"Scoring with the weights of step {predictor.step:,}{how}.", flush=True)
    scored = score_file(
        predictor,
        arguments.data.path,
        arguments.out,
        where=arguments.data.where,
        keys=arguments.data.keys,
        progress=_show,
    )
    if scored.bad_rows:
        print(f"{scored.bad_rows:,} rows with a wrong number of columns left out.")
    print_irregular(scored.counts["columns"])
    for warning in scored.warnings:
        print(printable(warning))
    rate = scored.rows / scored.seconds
    print(
        f"{scored.rows:,} rows scored in {scored.seconds:,.1f} s ({rate:,.0f} rows a "
        f"second, compiling included): {arguments.out}"
    )
    return 0


def print_irregular(columns: dict[str, dict[str, int]]):
    """Prints the values that a policy applied to, by column."""
    for column, kinds in columns.items():
        counts = (f"{kinds[kind]:,} {KIND_WORDS.get(kind, kind)}" for kind in kinds)
        print(printable(f"{column}: {', '.join(counts)}"))


def _show(rows: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{rows:,} rows", end="\r", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave_on_interrupt()
    sys.exit(main(sys.argv[1:]))
