"""Measures all sites of a model and returns the table."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from loka_jax.dispatch.candidates import feasible
from loka_jax.dispatch.plan import key_of
from loka_jax.dispatch.table import Table, header_here
from loka_jax.nn import Site
from loka_jax.options import require
from loka_jax.probe.site import SiteStats
from loka_jax.tuning.pool import measure_all
from loka_jax.tuning.site import Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is measured.

    Attributes:
        batch_sizes: at which times are measured; none for that of training.
        pairs: operands drawn for the errors.
        rows: of these, at most.
        seed: of all draws.
        workers: processes that compile at a time; they take times one after another.
    """

    batch_sizes: tuple[int, ...] = ()
    pairs: int = 50
    rows: int = 1024
    seed: int = 0
    workers: int = max(1, (os.cpu_count() or 1) // 2)

    def __post_init__(self):  # noqa: D105
        for name, least in {"pairs": 2, "rows": 16, "seed": 0, "workers": 1}.items():
            value = getattr(self, name)
            require(value >= least, f"--tune.{name}", value, f"at least {least}")
        for size in self.batch_sizes:
            require(size >= 1, "--tune.batch-sizes", size, "at least 1")


def tune(
    name: str,
    sites: Sequence[Site],
    known: Mapping[str, SiteStats],
    config: TuneConfig,
    say: Callable[[str], None] = print,
) -> Iterator[Table]:
    """Yields what was measured of every candidate at a site, for all sites of a model.

    Args:
        name: of the model, under which the table keeps errors.
        sites: of the model.
        known: Probe's statistics by path; N(0, 1) stands in for those that are missing.
        config: what is measured.
        say: takes a line on what is being done.
    """
    header = header_here()
    jobs = _jobs(name, sites, known, config)
    for job, entry in measure_all(jobs, config.workers, say):
        yield Table(header, {job.site: entry})


def _jobs(
    name: str,
    sites: Sequence[Site],
    known: Mapping[str, SiteStats],
    config: TuneConfig,
) -> list[Job]:
    jobs = []
    for site in sites:
        if not site.has_choice or site.recipe == "f32":
            continue
        for m in config.batch_sizes or (site.m,):
            key = key_of(dataclasses.replace(site, m=m))
            jobs.append(
                Job(
                    site=key,
                    choices=tuple(feasible(key)),
                    stats=known.get(site.path),
                    source=_source(name, site, known),
                    pairs=config.pairs,
                    rows=config.rows,
                    seed=config.seed,
                )
            )
    return jobs


def _source(name: str, site: Site, known: Mapping[str, SiteStats]) -> str:
    source = f"{name} {site.path}"
    return source if site.path in known else f"N(0, 1) for {source}"
