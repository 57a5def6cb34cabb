"""Measures all sites of a model and returns the table."""

import dataclasses
from collections.abc import Callable

from loka_jax import nn
from loka_jax.dispatch.candidates import feasible
from loka_jax.dispatch.plan import key_of
from loka_jax.dispatch.table import Table, header_here
from loka_jax.nn import Site
from loka_jax.options import require
from loka_jax.probe.site import SiteStats
from loka_jax.train.build import Run
from loka_jax.train.state import TrainState
from loka_jax.tuning.pool import Pool
from loka_jax.tuning.site import Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What is measured.

    Attributes:
        batch_sizes: at which times are measured; none for that of training.
        pairs: operands drawn for the errors.
        rows: of these, at most.
        seed: of all draws.
    """

    batch_sizes: tuple[int, ...] = ()
    pairs: int = 50
    rows: int = 1024
    seed: int = 0

    def __post_init__(self):  # noqa: D105
        for name, least in {"pairs": 2, "rows": 16, "seed": 0}.items():
            value = getattr(self, name)
            require(value >= least, f"--tune.{name}", value, f"at least {least}")
        for size in self.batch_sizes:
            require(size >= 1, "--tune.batch-sizes", size, "at least 1")


def tune(
    run: Run,
    state: TrainState | None,
    config: TuneConfig,
    say: Callable[[str], None] = print,
) -> Table:
    """Returns what was measured of every candidate at every site of a model.

    Args:
        run: the model.
        state: with Probe's statistics of its sites; None for N(0, 1).
        config: what is measured.
        say: takes a line on what is being done.
    """
    table = Table(header_here())
    known = {} if state is None else nn.by_path(state.probe)
    jobs = _jobs(run, known, config)
    with Pool(say) as pool:
        for i, job in enumerate(jobs):
            say(f"{i + 1} of {len(jobs)}: {job.site} ({job.source})")
            entry = pool.measure(job)
            table = table.merged(Table(table.header, {job.site: entry}))
    return table


def _jobs(run: Run, known: dict[str, SiteStats], config: TuneConfig) -> list[Job]:
    jobs = []
    for site in run.sites:
        if not site.has_choice or site.recipe == "f32":
            continue
        for m in config.batch_sizes or (site.m,):
            key = key_of(dataclasses.replace(site, m=m))
            jobs.append(
                Job(
                    site=key,
                    choices=tuple(feasible(key)),
                    stats=known.get(site.path),
                    source=_source(run, site, known),
                    pairs=config.pairs,
                    rows=config.rows,
                    seed=config.seed,
                )
            )
    return jobs


def _source(run: Run, site: Site, known: dict[str, SiteStats]) -> str:
    if site.path in known:
        return f"{run.config.name} {site.path}"
    return f"N(0, 1) {run.config.name} {site.path}"
