"""Takes the times of a table's candidates again, after a change of their programs.

    python experiments/retime.py [--table TABLE] --out NEW.json [--part 1 --parts 1]

Measures every candidate at every site of the table, on this device and with these
sources, on operands from N(0, 1), of which kernel times do not depend. Errors and
effects on the loss are kept: they are those of the recipes. A part takes every n-th
site; NEW gets the sites of all parts that were written to it.

Exit codes: 0 measured; 2 not a table, or a table that cannot be added to.
"""

import dataclasses
import pathlib
import sys

import tyro

from experiments.cli import run_cli
from experiments.restamp import SHIPPED
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import candidates
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.pool import measure_all
from loka_jax.dispatch.table import Table, header_here
from loka_jax.dispatch.tuning import TuneConfig
from loka_jax.site import SiteSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line.

    Attributes:
        out: the file of the new table.
        table: the old table.
        part: which part of the sites, from 1.
        parts: the number of parts.
        workers: processes that compile at a time.
    """

    out: pathlib.Path
    table: pathlib.Path = SHIPPED
    part: int = 1
    parts: int = 1
    workers: int = TuneConfig().workers


def retime(options: Options) -> int:
    """Measures and writes the new table after every site; returns the exit code."""
    old = tables.read(options.table)
    # Large sites lie side by side, so a slice is a fair part.
    sites = sorted(old.sites)[options.part - 1 :: options.parts]
    jobs = [_job(site) for site in sites]
    for job, entry in measure_all(jobs, options.workers, print):
        before = old.sites[job.spec]
        entry = dataclasses.replace(entry, errors=before.errors, effects=before.effects)
        tables.add(options.out, Table(header_here(), {job.spec: entry}))
    return 0


def _job(site: SiteSpec) -> Job:
    return Job(
        spec=site,
        choices=tuple(candidates(site)),
        stats=None,
        source="N(0, 1)",
        pairs=2,
        rows=64,
        seed=0,
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns the exit code."""
    return run_cli(lambda: retime(tyro.cli(Options, args=argv, description=__doc__)))


if __name__ == "__main__":
    sys.exit(main())
