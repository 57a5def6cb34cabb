"""Stamps a dispatch table anew if its candidates' programs have not changed.

    python experiments/restamp.py [TABLE ...]

A change of the sources makes a table stale. This lowers the programs of all candidates
in the table, without a GPU and for as many sites at a time as there are cores, and
compares their digests with those in the table. If all are equal, the times still hold
and the table gets the digest of the current sources. Otherwise the table stays as it
is, and the sites and choices that differ are listed, to be measured again.

`--record` stores the digests of a table that was just measured, with these sources.

Exit codes: 0 stamped, 1 programs differ, 2 not a table for these versions.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Annotated

import jax
import tyro

from experiments.cli import run_cli
from loka_jax.dispatch import sources
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.site_programs import site_programs
from loka_jax.dispatch.table import Table
from loka_jax.site import SiteSpec

SHIPPED = pathlib.Path(tables.__file__).parent / "tables" / "nvidia_h200.json"

# Digests by candidate, of each site.
type Programs = dict[SiteSpec, dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line.

    Attributes:
        paths: the tables.
        record: store the digests of a table that was measured with these sources.
        workers: processes.
    """

    paths: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional] = (SHIPPED,)
    record: bool = False
    workers: int = os.cpu_count() or 1


def restamp(path: pathlib.Path, *, record: bool = False, workers: int = 1) -> int:
    """Stamps a table, or lists the candidates that differ; returns the exit code.

    Raises:
        ValueError: if the file is not a table, or was measured with other versions, or
            is to be recorded and was measured with other sources.
    """
    table = tables.read(path)
    _require_versions(path, table, record)
    programs = programs_of(table, workers)
    if not record:
        changed = differences(table, programs)
        if changed:
            print(f"{path.name}: {len(changed)} programs differ; measure them again:")
            print("\n".join(f"  {line}" for line in changed))
            return 1
    sites = {
        site: dataclasses.replace(entry, programs=programs[site])
        for site, entry in table.sites.items()
    }
    header = dataclasses.replace(table.header, kernels=sources.digest())
    tables.write(path, dataclasses.replace(table, header=header, sites=sites))
    print(f"{path.name}: {'recorded' if record else 'all programs equal, stamped'}")
    return 0


def differences(table: Table, programs: Programs) -> list[str]:
    """Returns a line for each candidate whose digest is not the table's."""
    return [
        f"{site}: {name}" + ("" if name in entry.programs else " (not recorded)")
        for site, entry in sorted(table.sites.items())
        for name, digest in programs[site].items()
        if entry.programs.get(name) != digest
    ]


def programs_of(table: Table, workers: int) -> Programs:
    """Returns the digests of all candidates, with a line of progress on a terminal."""
    # The sites with most candidates first, so that none of them runs alone at the end.
    sites = sorted(table.sites, key=lambda site: -len(table.sites[site].passes()))
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_use_cpu
    ) as pool:
        jobs = {
            pool.submit(site_programs, site, table.sites[site].passes()): site
            for site in sites
        }
        programs = {}
        for job in concurrent.futures.as_completed(jobs):
            programs[jobs[job]] = job.result()
            seconds = time.monotonic() - start
            print(
                f"{len(programs)}/{len(sites)} sites, {seconds:.0f} s: {jobs[job]}",
                file=sys.stderr,
            )
    return programs


def _use_cpu():
    # Nothing is computed, and a GPU backend would allocate memory.
    jax.config.update("jax_platforms", "cpu")


def _require_versions(path: pathlib.Path, table: Table, record: bool):
    here: Mapping[str, str] = {
        "jax": jax.__version__,
        "jaxlib": sources.version("jaxlib"),
        "triton": sources.triton_versions(),
    }
    for name, version in here.items():
        measured = getattr(table.header, name)
        if measured not in ("", version):
            raise ValueError(
                f"{path} was measured with {name} {measured}, but here it is "
                f"{version or 'missing'}: only programs of one version compare."
            )
    if record and table.header.kernels != sources.digest():
        raise ValueError(
            f"{path} was measured with other sources, whose programs cannot be "
            "recorded here: check out the commit of the measurement."
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns the exit code."""

    def command() -> int:
        options = tyro.cli(Options, args=argv, description=__doc__)
        return max(
            restamp(path, record=options.record, workers=options.workers)
            for path in options.paths
        )

    return run_cli(command)


if __name__ == "__main__":
    sys.exit(main())
