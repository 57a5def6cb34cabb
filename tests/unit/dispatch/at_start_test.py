"""Tuning at the start: what is worth measuring, within a budget."""

import dataclasses
import functools

import pytest

from loka_jax import nn
from loka_jax.dispatch import at_start, local
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.at_start import (
    Agenda,
    jobs_worth_measuring,
    worth_measuring,
)
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.local import Local
from loka_jax.dispatch.performance import Estimates, PerformanceModel
from loka_jax.dispatch.table import Entry, Table
from loka_jax.ops.plan import resolve_served
from loka_jax.recipe import get_recipe
from loka_jax.site import BF16, SiteSpec
from tests.support import stand_ins

ROW, KERNEL = "xla fp8_rowwise", "pallas bf16"


@functools.cache
def _fitted():
    """Returns every third site that predictions are fitted to."""
    fitted = local.fitted_table("NVIDIA H200")
    return dataclasses.replace(fitted, sites=dict(list(fitted.sites.items())[::3]))


def _site(path, m=5000, n=256):
    spec = SiteSpec(m, 448, n, "layer", "swish")
    plan = resolve_served(spec, get_recipe("fp8_rowwise"), stand_ins.CPU)
    return nn.Site(path=path, plan=plan)


def _estimates(times, spreads):
    return Estimates(Entry({"training": times}), {"training": spreads})


def _names(estimates):
    return [choice.name for choice in worth_measuring(estimates)]


def test_candidates_that_may_be_the_fastest_are_worth_measuring():
    times = {BF16.name: 10.0, KERNEL: 9.0, ROW: 12.0}
    doubt = dict.fromkeys(times, 0.1)
    # Rows in FP8 would have to be 30 % faster than predicted.
    assert _names(_estimates(times, doubt)) == [BF16.name, KERNEL]
    assert ROW in _names(_estimates(times, doubt | {ROW: 0.4}))


def test_measured_sites_are_not_measured_again():
    times = {BF16.name: 10.0, KERNEL: 9.0}
    assert _names(_estimates(times, {})) == []
    # A candidate that was left out, and may be the fastest after all, is.
    assert _names(_estimates(times | {ROW: 8.0}, {ROW: 0.2})) == [BF16.name, ROW]


def test_sites_at_stake_come_first_and_each_spec_once():
    model = PerformanceModel(Table(Header("", "", "", "", "")), fitted=_fitted())
    sites = [_site("a", m=1000), _site("b", m=60_000), _site("c", m=60_000)]
    jobs = jobs_worth_measuring(sites, model)
    assert [job.spec.m for job in jobs] == [60_000, 1000]
    assert all(job.choices[0] == BF16 and 2 <= len(job.choices) <= 9 for job in jobs)
    assert all(job.passes == ("training",) and not job.in_chain for job in jobs)


def _agenda(*sites):
    model = PerformanceModel(Table(Header("", "", "", "", "")), fitted=_fitted())
    return Agenda(sites, model)


def _found(job, us):
    (choice,) = job.choices
    entry = Entry({"training": {choice.name: us}})
    return Table(Header("", "", "", "", ""), {job.spec: entry})


def test_idle_processes_are_spread_over_sites_and_xla_comes_first():
    agenda = _agenda(_site("a", m=1000), _site("b", m=60_000))
    jobs = [agenda.next_job() for _ in range(4)]
    assert [job.spec.m for job in jobs[:2]] == [60_000, 1000]
    assert [job.choices for job in jobs[:2]] == [(BF16,)] * 2
    assert {job.spec.m for job in jobs[2:]} == {60_000, 1000}
    assert all(job.choices != (BF16,) for job in jobs[2:])
    # Those of XLA are not compared with the reference.
    assert [job.is_judged for job in jobs] == [False, False, True, True]


def test_an_agenda_ends_and_asks_for_each_candidate_once():
    agenda = _agenda(_site("a"), _site("b", n=512))
    asked = []
    while (job := agenda.next_job()) is not None:
        asked.append((job.spec, *job.choices))
        assert agenda.left()
        agenda.learn(job, _found(job, 50.0))
    assert len(asked) == len(set(asked)) and not agenda.left()
    by_site = [{c for s, c in asked if s == spec} for spec in {s for s, _ in asked}]
    assert all(sum(c.is_fp8 for c in own) <= 3 for own in by_site)


def test_a_measurement_makes_others_superfluous():
    # A kernel of a tenth of what was predicted leaves nothing that may be faster.
    agenda = _agenda(_site("a"))
    while (job := agenda.next_job()) is not None and job.choices == (BF16,):
        agenda.learn(job, _found(job, 100.0))
    agenda.learn(job, _found(job, 1.0))
    rest = []
    while (job := agenda.next_job()) is not None:
        rest += job.choices
        agenda.learn(job, _found(job, 100.0))
    assert not any(choice.is_fp8 for choice in rest)


def test_what_is_under_way_is_left():
    agenda = _agenda(_site("a"))
    jobs = []
    while (job := agenda.next_job()) is not None:
        jobs.append(job)
    assert agenda.left() == {jobs[0].spec}
    for job in jobs:
        agenda.learn(job, _found(job, 50.0))
    assert all(agenda.next_job() is not None for _ in agenda.left())


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Runs `tune_at_start` with a stand-in for the worker processes."""
    fitted = _fitted()
    header = local.header_here()
    monkeypatch.setattr(at_start, "cache_path", lambda: tmp_path / "cache.json")

    def known():
        path = tmp_path / "cache.json"
        table = tables.read(path) if path.exists() else Table(header)
        return Local(PerformanceModel(table, fitted=fitted))

    monkeypatch.setattr(at_start, "local_performance", known)
    lines, calls = [], []

    def measure_on_demand(next_job, workers, say, *, seconds):
        calls.append(seconds)
        i = 0
        while (job := next_job()) is not None:
            (choice,) = job.choices
            yield job, Entry({"training": {choice.name: 5.0 + i}})
            i += 1

    monkeypatch.setattr(at_start, "measure_on_demand", measure_on_demand)

    def run(sites):
        return at_start.tune_at_start(sites, 30.0, name="m", say=lines.append)

    return run, lines, calls


def test_measurements_are_kept_and_read_by_the_next_start(tuned):
    run, lines, calls = tuned
    site = _site("a")
    local_after = run([site, dataclasses.replace(site, path="b")])
    estimates = local_after.performance.estimates(site.spec)
    assert estimates.entry.times["training"][BF16.name] == 5.0
    assert estimates.spread("training", BF16) is None
    assert calls == [30.0]
    assert "30 seconds at most" in lines[0] and "1 of 1 sites tuned" in lines[1]


def test_without_a_gpu_nothing_is_tuned(monkeypatch):
    lines = []
    assert at_start.tune_at_start([_site("a")], 30.0, say=lines.append) == (None, ())
    assert "no GPU" in lines[0]
