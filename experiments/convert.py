"""Converts click logs to memory-mapped shards, or checks a folder of them.

    python experiments/convert.py --data.kind criteo --data.path clicks.txt.gz \\
        --out shards/
    python experiments/convert.py --data.path clicks.csv --data.label click \\
        --data.categorical user item --data.dense price --out shards/
    python experiments/convert.py --verify shards/

Train on the result with `--data.path shards/`. An error in the input ends the
conversion with one sentence and exit code 2, and leaves nothing behind.
"""

import sys

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()

import dataclasses
import json
import pathlib

from experiments.options import parse_options
from loka_jax.commands import interruptible, unwind_on_sigterm
from loka_jax.data.config import DataConfig
from loka_jax.data.convert import convert
from loka_jax.data.files import find_sources
from loka_jax.data.places import existing
from loka_jax.data.shards import open_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Converts click logs to shards.

    Attributes:
        data: the data and its preprocessing.
        out: the folder to create.
        verify: a folder of shards to check by sizes and digests; nothing is converted.
    """

    data: DataConfig = DataConfig(kind="table")
    out: str | None = None
    verify: str | None = None


def main(arguments: list[str]) -> int:
    """Runs one command line; returns the exit code."""
    interruptible()
    unwind_on_sigterm()
    try:
        _run(parse_options(Arguments(), arguments, "convert.py"))
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written", file=sys.stderr)
        return 130
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        print(f"error: {error.strerror or error}{name}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(arguments: Arguments) -> None:
    if arguments.verify is not None:
        open_shards(existing(arguments.verify), verify=True)
        print(f"{arguments.verify} is intact")
        return
    if arguments.out is None:
        raise ValueError("--out is missing: name a new folder.")
    if arguments.data.kind == "generated":
        raise ValueError(
            "generated data needs no conversion: use --data.kind criteo or "
            "--data.kind table."
        )
    target = pathlib.Path(arguments.out).expanduser()
    convert(arguments.data, find_sources(arguments.data), target, progress=_show)
    folder = open_shards(target)
    report = {key: value for key, value in folder.report.items() if key != "splits"}
    report["vocab_sizes"] = folder.schema.vocab_sizes
    print(json.dumps(report, indent=1))


def _show(stage: str, rows: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{stage}: {rows:,} rows", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
