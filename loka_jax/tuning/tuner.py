"""Measures all sites of a model and returns the table."""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from loka_jax.dispatch.candidates import SiteKey, feasible
from loka_jax.dispatch.plan import key_of
from loka_jax.dispatch.table import Interval, Table, header_here
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
        held_out_batches: of the validation data, at most, for the effect on the loss.
        seed: of all draws.
        workers: processes that compile at a time; they take times one after another.
    """

    batch_sizes: tuple[int, ...] = ()
    pairs: int = 50
    rows: int = 1024
    held_out_batches: int = 32
    seed: int = 0
    workers: int = max(1, (os.cpu_count() or 1) // 2)

    def __post_init__(self):  # noqa: D105
        least = {"pairs": 2, "rows": 16, "held_out_batches": 1, "seed": 0, "workers": 1}
        for name, bound in least.items():
            value = getattr(self, name)
            option = f"--tune.{name.replace('_', '-')}"
            require(value >= bound, option, value, f"at least {bound}")
        for size in self.batch_sizes:
            require(size >= 1, "--tune.batch-sizes", size, "at least 1")


def tune(
    name: str,
    sites: Sequence[Site],
    known: Mapping[str, SiteStats],
    config: TuneConfig,
    *,
    effects: Mapping[str, Interval] | None = None,
    timed: Collection[SiteKey] = (),
    say: Callable[[str], None] = print,
) -> Iterator[Table]:
    """Yields what was measured of every candidate at a site, for all sites of a model.

    Args:
        name: of the model, under which the table keeps errors.
        sites: of the model.
        known: Probe's statistics by path; N(0, 1) stands in for those that are missing.
        config: what is measured.
        effects: of FP8 at a path on the loss, see `Entry`.
        timed: sites whose times are known, and errors alone are measured.
        say: takes a line on what is being done.
    """
    header = header_here()
    jobs = list(_jobs(name, sites, known, config, timed))
    by_source = {
        _source(name, path, known): effect for path, effect in (effects or {}).items()
    }
    for job, entry in measure_all(jobs, config.workers, say):
        if job.source in by_source:
            entry.effects[job.source] = by_source[job.source]
        yield Table(header, {job.site: entry})


def _jobs(
    name: str,
    sites: Sequence[Site],
    known: Mapping[str, SiteStats],
    config: TuneConfig,
    timed: Collection[SiteKey],
) -> Iterator[Job]:
    timed = set(timed)
    for site in sites:
        if not site.has_choice or site.recipe == "f32":
            continue
        for m in config.batch_sizes or (site.m,):
            key = key_of(dataclasses.replace(site, m=m))
            yield Job(
                site=key,
                choices=() if key in timed else tuple(feasible(key)),
                stats=known.get(site.path),
                source=_source(name, site.path, known),
                pairs=config.pairs,
                rows=config.rows,
                seed=config.seed,
            )
            timed.add(key)


def _source(name: str, path: str, known: Mapping[str, SiteStats]) -> str:
    source = f"{name} {path}"
    return source if path in known else f"N(0, 1) for {source}"
