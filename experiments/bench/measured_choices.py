"""What plans run at a site once they may measure, with a table in place of a GPU.

    auto  what `first_use.check_plan` leaves: it measures what a plan chose by
          prediction, and what may be faster, and plans again
    tune  the same after what `at_start.Agenda` found worth measuring was measured

Both are the product's own code; only measurements come from the table. Only candidates
that are in the table take part, and FP8 counts as accurate enough.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from loka_jax import nn
from loka_jax.dispatch.at_start import Agenda
from loka_jax.dispatch.candidates import candidates
from loka_jax.dispatch.first_use import as_if_accurate, check_plan
from loka_jax.dispatch.measuring import Job
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import make_plan
from loka_jax.dispatch.policy import Limits
from loka_jax.dispatch.table import Entry, Table
from loka_jax.dispatch.work import roles_of
from loka_jax.ops.device import HOPPER
from loka_jax.ops.plan import resolve
from loka_jax.site import Choice, SiteSpec

# What is the fastest, without what a site must gain to leave XLA or bfloat16.
BY_TIME = Limits(speedup=1.0, leave_xla=1.0)

_ASKED = Choice.parse("xla fp8_rowwise")  # by the model, so that FP8 is open


class Outcome(NamedTuple):
    """What runs in the end.

    Attributes:
        choice: the name of it.
        measured: candidates that were measured for it.
        rounds: of measuring, one after another.
    """

    choice: str
    measured: int
    rounds: int


class TableGpu:
    """A site on a GPU that takes the times that a table has for a pass."""

    def __init__(self, table: Table, spec: SiteSpec, pass_name: str):
        """Takes the table, one of its sites, and "training" or "inference"."""
        self._header, self._spec, self._pass = table.header, spec, pass_name
        self._times = table.sites[spec].times[pass_name]
        self._measured = self._rounds = 0

    @property
    def site(self) -> nn.Site:
        """The site of a model that asks for FP8."""
        return nn.Site(path="site", plan=resolve(self._spec, _ASKED, HOPPER))

    def unknown(self) -> Table:
        """Returns a table without times, for the candidates that can be measured."""
        others = [c.name for c in candidates(self._spec) if c.name not in self._times]
        entry = Entry(failures=dict.fromkeys(others, "is not in the table"))
        return Table(self._header, {self._spec: entry})

    def known(self, choices: Sequence[Choice]) -> Table:
        """Returns the times of some candidates, as a table."""
        self._measured += len(choices)
        times = {choice.name: self._times[choice.name] for choice in choices}
        return Table(self._header, {self._spec: Entry({self._pass: times})})

    def measure(self, jobs: Sequence[Job], _: float) -> Iterator[tuple[Job, Table]]:
        """Yields what jobs measure, as `at_start.measure_into_cache` does."""
        self._rounds += 1
        for job in jobs:
            yield job, self.known(job.choices)

    def outcome(self, performance: PerformanceModel, limits: Limits) -> Outcome:
        """Returns what runs after the check of a plan within limits."""
        sites = [self.site]
        make = functools.partial(
            make_plan,
            sites,
            limits=limits,
            roles=roles_of(self._pass),
            errors=as_if_accurate(sites),
        )
        checked = check_plan(
            make,
            sites,
            performance,
            math.inf,
            lambda line: None,
            pass_name=self._pass,
            measure=self.measure,
        )
        ((_, choice),) = checked.plan.choices
        return Outcome(choice.name, self._measured, self._rounds)


def auto(model: PerformanceModel, gpu: TableGpu, limits: Limits = BY_TIME) -> Outcome:
    """Returns what `--plan auto` runs at a site that is not known."""
    return gpu.outcome(model.with_table(gpu.unknown()), limits)


def tune(model: PerformanceModel, gpu: TableGpu, limits: Limits = BY_TIME) -> Outcome:
    """Returns what `--plan tune` runs at a site that is not known."""
    agenda = Agenda([gpu.site], model.with_table(gpu.unknown()))
    while (job := agenda.next_job()) is not None:
        agenda.learn(job, gpu.known(job.choices))
    return gpu.outcome(agenda.performance, limits)
