"""Tuning at the start of a run: measures the few candidates that may be the fastest.

    worth measuring   XLA's bfloat16, and whatever may be the fastest of the site, going
                      by the lower ends of the predictions

Sites come in the order of what their uncertainty may cost, until the budget is spent.
One candidate is measured at a time, by as many processes as there are; each measurement
tells of the others, so that what is worth measuring next is decided anew. Only the
training pass is timed, alone: what a chain adds is predicted. Measurements go to the
user's cache, which later runs read too; several processes may add to it at once.
"""

import dataclasses
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.local import Local, cache_path, local_performance
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.performance import Estimates, PerformanceModel
from loka_jax.dispatch.plan import is_open
from loka_jax.dispatch.pool import Turns, fitting, measure_all
from loka_jax.dispatch.table import Table
from loka_jax.measure.checking import NO_MEMORY
from loka_jax.nn import Site
from loka_jax.site import BF16, Choice, SiteSpec

_MOST_CANDIDATES = 3  # of a site, in FP8
_DOUBT = 1.0  # spreads below its prediction at which a candidate's time may lie
_PASS = "training"
_WORKERS = max(1, (os.cpu_count() or 1) - 2)  # each lowers in one thread


def tune_at_start(
    sites: Sequence[Site],
    seconds: float,
    *,
    name: str = "model",
    say: Callable[[str], None] = print,
) -> Local:
    """Returns what is known of this machine after measuring what matters at some sites.

    Args:
        seconds: the budget; a measurement under way is ended with it.
    """
    local = local_performance()
    if local.performance is None:
        say(f"{name}: nothing is tuned, as there is no GPU with FP8.")
        return local
    agenda = Agenda(sites, local.performance)
    by_shape = Counter(table_key(site.spec) for site in sites if is_open(site))
    unknown = {job.spec for job in agenda.jobs}
    if not unknown:
        say(f"{name}: all {by_shape.total()} sites are known, nothing is tuned.")
        return local
    count = sum(by_shape[spec] for spec in unknown)
    say(f"{name}: tuning {count} sites, for {seconds:g} seconds at most.")
    start, measured = time.monotonic(), 0
    on_demand = iter(agenda.next_job, object())
    for job, table in measure_into_cache(agenda.jobs, seconds, on_demand):
        agenda.learn(job, table)
        measured += 1
    took = time.monotonic() - start
    tuned = sum(by_shape[spec] for spec in unknown - agenda.left())
    say(
        f"{name}: {tuned} of {count} sites tuned in {took:.0f} seconds, "
        f"{measured} candidates measured."
    )
    return local_performance()


class Agenda:
    """What is worth measuring at the sites of a model, by what is known so far."""

    def __init__(self, sites: Sequence[Site], performance: PerformanceModel):
        """Takes the sites and what is known at first."""
        self._sites = sites
        self._asked: set[Job] = set()
        self._running: Counter[SiteSpec] = Counter()
        self._know(performance)

    def next_job(self) -> Job | None:
        """Returns a candidate that was not returned before; None if there is none now.

        That of a site with the fewest under way: each measurement may make others of
        its site superfluous.
        """
        fewest = min(
            self._unasked(), key=lambda job: self._running[job.spec], default=None
        )
        if fewest is not None:
            self._asked.add(fewest)
            self._running[fewest.spec] += 1
        return fewest

    def learn(self, job: Job, table: Table):
        """Takes what a job measured."""
        self._running[job.spec] -= 1
        known = self.performance
        self._know(known.with_table(known.table.merged(table)))

    def left(self) -> set[SiteSpec]:
        """Returns the sites of which something is still to be measured."""
        return {job.spec for job in self._unasked()} | set(+self._running)

    def _know(self, performance: PerformanceModel):
        self.performance = performance
        self.jobs = jobs_worth_measuring(self._sites, performance)

    def _unasked(self) -> list[Job]:
        """Returns the jobs that were not returned before, without FP8 past the most."""
        fp8 = Counter(job.spec for job in self._asked if _is_fp8(job))
        return [
            job
            for job in self.jobs
            if job not in self._asked
            and not (_is_fp8(job) and fp8[job.spec] >= _MOST_CANDIDATES)
        ]


def _is_fp8(job: Job) -> bool:
    return job.choice is not None and job.choice.is_fp8


def measure_into_cache(
    jobs: Sequence[Job],
    seconds: float,
    on_demand: Iterator[Job | None] | None = None,
    turns: Turns | None = None,
) -> Iterator[tuple[Job, Table]]:
    """Yields each job and what it measured, which is in the user's cache then.

    Candidates that were not checked are left out there: another run may leave more
    memory.

    Args:
        on_demand: which of the jobs is next; their own order if None.
        turns: as in `measure_all`.
    """
    workers = fitting(_WORKERS, jobs)
    own, silent = on_demand or jobs, lambda sentence: None
    measured = measure_all(own, workers, silent, seconds=seconds, turns=turns)
    for job, entry in measured:
        lasting = {name: x for name, x in entry.failures.items() if x != NO_MEMORY}
        kept = dataclasses.replace(entry, failures=lasting)
        tables.add(cache_path(), Table(header_here(), {job.spec: kept}))
        yield job, Table(header_here(), {job.spec: entry})


def candidate_job(
    spec: SiteSpec, choice: Choice, pass_name: str, *, in_chain: bool = False
) -> Job:
    """Returns the job of a candidate.

    XLA's bfloat16 is timed only: it runs in any case, and its check takes as long as
    that of another candidate.
    """
    return Job(
        spec, choice, passes=(pass_name,), in_chain=in_chain, is_judged=choice != BF16
    )


def jobs_worth_measuring(
    sites: Sequence[Site], performance: PerformanceModel
) -> list[Job]:
    """Returns the candidates to measure, those of the site that may cost most first."""
    stakes: dict[SiteSpec, float] = {}
    choices: dict[SiteSpec, tuple[Choice, ...]] = {}
    for site in filter(is_open, sites):
        spec = table_key(site.spec)
        estimates = performance.estimates(spec)
        worth = worth_measuring(estimates)
        if len(worth) < 2:
            continue
        spread = max(estimates.spread(_PASS, choice) or 0.0 for choice in worth)
        us = estimates.entry.times[_PASS][BF16.name]
        stakes[spec] = stakes.get(spec, 0.0) + us * spread
        choices[spec] = worth
    return [
        candidate_job(spec, choice, _PASS)
        for spec in sorted(stakes, key=lambda spec: -stakes[spec])
        for choice in choices[spec]
    ]


def worth_measuring(estimates: Estimates) -> tuple[Choice, ...]:
    """Returns the candidates of a site whose times decide; none if they are known.

    All in bfloat16 are among them, as FP8 may prove not to be accurate enough.
    """
    times = estimates.entry.times.get(_PASS, {})
    spreads = estimates.spreads.get(_PASS, {})
    if not times:
        return ()
    best = min(times.values())
    lowest = {name: times[name] * math.exp(-_DOUBT * spreads[name]) for name in spreads}
    close = sorted((us, name) for name, us in lowest.items() if us <= best)
    names = [name for _, name in close[:_MOST_CANDIDATES]]
    names += [name for name in spreads if not Choice.parse(name).is_fp8]
    return tuple(map(Choice.parse, dict.fromkeys([BF16.name, *names] if names else [])))
