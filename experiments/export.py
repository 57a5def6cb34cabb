"""Writes the model of a trained run to a folder that needs jax alone.

    python experiments/export.py --workdir runs/csv_dlrm-... --out model/

    import loader                                 # model/loader.py
    model = loader.load("model")
    model.scores({"price": [1.5], "user": ["u1"]})

There is a program for each platform and batch size. An error that the user can mend
ends with one sentence and exit code 2, and leaves no folder.
"""

import dataclasses
import pathlib
import sys
from typing import Literal

from experiments.options import run_alone
from loka_jax.commands import leave_on_interrupt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Writes the model of a trained run to a folder that needs jax alone.

    Attributes:
        workdir: the folder of the run.
        out: the new folder.
        batch_sizes: rows of the programs, 1, 16, 128, 1,024 and the run's if none are
            given; fewer rows are padded to the next, more are split.
        platforms: for which programs are made; a GPU is not needed.
        plan: "auto" lets Dispatch choose at each batch size if there is a GPU here;
            "saved" keeps the run's plan; "off" runs all by XLA in the model's recipe.
    """

    workdir: pathlib.Path
    out: pathlib.Path
    batch_sizes: tuple[int, ...] = ()
    platforms: tuple[Literal["cpu", "cuda"], ...] = ("cpu", "cuda")
    plan: Literal["auto", "saved", "off"] = "auto"


def main(line: list[str]) -> int:
    """Runs one command line; returns the exit code."""
    return run_alone(Arguments, line, "export.py", __doc__, _run)


def _run(arguments: Arguments) -> int:
    from loka_jax.export import export_run

    exported = export_run(
        arguments.workdir,
        arguments.out,
        batch_sizes=arguments.batch_sizes,
        platforms=arguments.platforms,
        plan=arguments.plan,
    )
    for batch_size, difference in exported.differences.items():
        equal = "equal bit for bit to" if difference == 0 else "NOT equal to"
        by = f" (by at most {difference:.2g})" if difference else ""
        rows = f"{batch_size:,} row{'s' if batch_size > 1 else ''}"
        print(f"{rows}: {equal} the run's evaluation step here{by}.")
    parts = ", ".join(f"{n:,} {name}" for name, n in exported.weight_bytes.items())
    print(f"{arguments.out}: {exported.num_bytes:,} bytes; of weights: {parts}.")
    return 0


if __name__ == "__main__":
    leave_on_interrupt()
    sys.exit(main(sys.argv[1:]))
