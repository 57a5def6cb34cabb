"""Stamps a dispatch table anew if its candidates' programs have not changed.

    python experiments/restamp.py [TABLE ...]

A change of the sources makes a table stale. This lowers the programs of all candidates
in the tables, without a GPU and for as many at a time as there are cores, and compares
their digests with those in the table; devices share programs. If all are equal, the
times still hold and the table gets the digest of the current sources. Otherwise the
table stays as it is, and the sites and choices that differ are listed, to be measured
again.

`--record` stores the digests of a table that was just measured, with these sources.

Exit codes: 0 stamped, 1 programs differ, 2 not a table for these versions.
"""

from loka_jax.commands import leave_on_interrupt

if __name__ == "__main__":  # the imports below take seconds
    leave_on_interrupt()

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import jax
import tyro

from experiments.cli import run_cli
from experiments.options import parse_alone
from loka_jax.dispatch import sources
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.site_programs import site_programs
from loka_jax.dispatch.table import Table
from loka_jax.site import SiteSpec

_FOLDER = pathlib.Path(tables.__file__).parent / "tables"
SHIPPED = _FOLDER / "nvidia_h200.json"

# Digests by candidate, of each site.
type Programs = dict[SiteSpec, dict[str, str]]
# A candidate at a site, and its passes.
type _Timed = tuple[SiteSpec, str, tuple[str, ...]]

_LINE_EVERY = 20  # candidates


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the command line.

    Attributes:
        paths: the tables.
        record: store the digests of a table that was measured with these sources.
        workers: processes.
    """

    paths: Annotated[tuple[pathlib.Path, ...], tyro.conf.Positional] = tuple(
        sorted(_FOLDER.glob("*.json"))
    )
    record: bool = False
    workers: int = os.cpu_count() or 1


def restamp(
    paths: Sequence[pathlib.Path], *, record: bool = False, workers: int = 1
) -> int:
    """Stamps tables, or lists the candidates that differ; returns the exit code.

    Raises:
        ValueError: if a file is not a table, or was measured with other versions, or
            is to be recorded and was measured with other sources.
    """
    each = [tables.read(path) for path in paths]
    for path, table in zip(paths, each, strict=True):
        _require_versions(path, table, record)
    programs = programs_of(each, workers)
    return max(
        _restamp(path, table, digests, record=record)
        for path, table, digests in zip(paths, each, programs, strict=True)
    )


def _restamp(
    path: pathlib.Path, table: Table, programs: Programs, *, record: bool
) -> int:
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


def programs_of(each: Sequence[Table], workers: int) -> list[Programs]:
    """Returns the digests of all candidates of each table, with lines of progress."""
    timed = {x for table in each for site in table.sites for x in _timed(table, site)}
    # Kernels first, which take the longest to lower.
    order = sorted(timed, key=lambda x: (x[1].startswith("xla"), x))
    start, context = time.monotonic(), multiprocessing.get_context("spawn")
    digests: dict[_Timed, str] = {}
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_use_cpu
    ) as pool:
        jobs = {pool.submit(_program, one): one for one in order}
        for job in concurrent.futures.as_completed(jobs):
            digests[jobs[job]] = job.result()
            if len(digests) % _LINE_EVERY == 0:
                seconds = time.monotonic() - start
                print(f"{len(digests)}/{len(jobs)}, {seconds:.0f} s", file=sys.stderr)
    return [
        {
            site: {one[1]: digests[one] for one in _timed(table, site)}
            for site in table.sites
        }
        for table in each
    ]


def _timed(table: Table, site: SiteSpec) -> list[_Timed]:
    passes = table.sites[site].passes()
    return [(site, name, tuple(sorted(names))) for name, names in passes.items()]


def _program(one: _Timed) -> str:
    site, name, names = one
    return site_programs(site, {name: names})[name]


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
        options = parse_alone(Options, argv, "restamp.py", __doc__)
        return restamp(options.paths, record=options.record, workers=options.workers)

    return run_cli(command)


if __name__ == "__main__":
    sys.exit(main())
