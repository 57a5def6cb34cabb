"""Tuning: measures all sites of a model, for a dispatch table."""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from loka_jax.dispatch.candidates import candidates, table_key
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.plan import is_open
from loka_jax.dispatch.pool import fitting, measure_all
from loka_jax.dispatch.table import Table
from loka_jax.measure.intervals import Interval
from loka_jax.nn import Site
from loka_jax.ops.device import local_device
from loka_jax.options import require
from loka_jax.probe.site import SiteStats
from loka_jax.site import SiteSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Options of tuning.

    Attributes:
        batch_sizes: at which times are measured; that of training if empty.
        pairs: operands drawn for the errors.
        rows: most rows of these operands.
        held_out_batches: most batches of validation data for the effect on the loss.
        workers: processes that compile at a time; they take times one after another.
    """

    batch_sizes: tuple[int, ...] = ()
    pairs: int = 50
    rows: int = 1024
    held_out_batches: int = 32
    workers: int = max(1, (os.cpu_count() or 1) // 2)

    def __post_init__(self):  # noqa: D105
        least = {"pairs": 2, "rows": 16, "held_out_batches": 1, "workers": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            option = f"--tune.{name.replace('_', '-')}"
            require(value >= bound, option, value, f"at least {bound}")
        for size in self.batch_sizes:
            require(size >= 1, "--tune.batch-sizes", size, "at least 1")


def tune(
    name: str,
    sites: Sequence[Site],
    stats: Mapping[str, SiteStats],
    config: TuneConfig,
    *,
    effects: Mapping[str, Interval] | None = None,
    timed: Collection[SiteSpec] = (),
    say: Callable[[str], None] = print,
) -> Iterator[Table]:
    """Yields the measurements of all candidates, each a table of one of them.

    Args:
        name: of the run, as in `make_plan`, under which the table keeps errors.
        stats: Probe's statistics by path; N(0, 1) stands in for a missing site.
        effects: by path, the effect of FP8 on the loss, see `Entry`.
        timed: keys of sites with times, of which only the errors are measured.
    """
    header = header_here()
    by_source = {
        _source(name, path, stats): effect for path, effect in (effects or {}).items()
    }
    jobs = list(jobs_of(name, sites, stats, config, timed))
    for job, entry in measure_all(jobs, fitting(config.workers, jobs), say):
        if job.source in by_source:
            entry.effects[job.source] = by_source[job.source]
        yield Table(header, {job.spec: entry})


def jobs_of(
    name: str,
    sites: Sequence[Site],
    stats: Mapping[str, SiteStats],
    config: TuneConfig,
    timed: Collection[SiteSpec],
) -> Iterator[Job]:
    """Yields the errors and the candidates of each site and number of rows.

    Arguments are those of `tune`.
    """
    timed = set(timed)
    for site in sites:
        if not is_open(site):
            continue
        for m in config.batch_sizes or (site.spec.m,):
            key = table_key(dataclasses.replace(site.spec, m=m))
            yield Job(
                key,
                None,
                stats=stats.get(site.path),
                source=_source(name, site.path, stats),
                pairs=config.pairs,
                rows=config.rows,
            )
            if key not in timed:
                for choice in candidates(key, local_device()):
                    yield Job(key, choice, in_chain=True)
            timed.add(key)


def _source(name: str, path: str, stats: Mapping[str, SiteStats]) -> str:
    source = f"{name} {path}"
    return source if path in stats else f"N(0, 1) for {source}"
