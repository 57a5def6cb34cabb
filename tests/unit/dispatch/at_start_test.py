"""Which candidates are measured, at the start, before they run, and by tuning."""

import dataclasses
import functools
import itertools
import math

import pytest

from loka_jax.dispatch import at_start, tuning
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.at_start import Agenda, jobs_worth_measuring, worth_measuring
from loka_jax.dispatch.candidates import candidates, table_key
from loka_jax.dispatch.first_use import (
    Budget,
    bf16_us,
    check_plan,
    check_seconds,
    unchecked,
)
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.local import Local
from loka_jax.dispatch.performance import Estimates, PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.dispatch.table import Entry, Table
from loka_jax.dispatch.tuning import TuneConfig, jobs_of, tune
from loka_jax.measure.checking import NO_MEMORY
from loka_jax.measure.intervals import Interval
from loka_jax.site import BF16, Choice, SiteSpec
from tests.support.dispatch import HEADER, KERNEL, ROW, fitted, in_a_row, site
from tests.support.stand_ins import CPU

TENSOR, FP8_KERNEL = "xla fp8_tensorwise", "pallas fp8_rowwise"


def _site(path, m=5000, n=256, recipe="fp8_rowwise"):
    return site(path, m, 448, n, recipe, norm="layer", activation="swish")


def _names(times, spreads):
    estimates = Estimates(Entry({"training": times}), {"training": spreads})
    return [choice.name for choice in worth_measuring(estimates)]


def test_candidates_that_may_be_the_fastest_are_worth_measuring():
    times = {BF16.name: 10.0, KERNEL: 9.0, ROW: 9.0 * math.exp(0.2)}
    doubt = dict.fromkeys(times, 0.1)
    # One spread below its prediction it would have to be as fast as the fastest.
    assert _names(times, doubt | {ROW: 0.199}) == [BF16.name, KERNEL]
    assert _names(times, doubt | {ROW: 0.201}) == [BF16.name, KERNEL, ROW]
    # Three at most, those that may be the fastest, and all in bfloat16.
    times = {KERNEL: 9.9, ROW: 9.5, TENSOR: 9.4, FP8_KERNEL: 9.3, BF16.name: 9.6}
    wide = dict.fromkeys(times, 0.3)
    wide[BF16.name] = 0.2
    assert _names(times, wide) == [BF16.name, FP8_KERNEL, TENSOR, ROW, KERNEL]


def _model():
    return PerformanceModel.of(Table(HEADER), fitted=fitted())


def test_sites_at_stake_come_first_and_each_spec_once():
    sizes = {"a": 1000, "b": 60_000, "c": 2000, "d": 2000}
    sites = [_site(path, m=m) for path, m in sizes.items()]
    sites.append(_site("e", m=90_000, recipe="f32"))
    jobs = jobs_worth_measuring(sites, _model())
    assert _rows(jobs) == [60_000, 2000, 1000]
    for m in _rows(jobs):
        first, *others = (job.choice for job in jobs if job.spec.m == m)
        assert first == BF16 and 1 <= len(others) <= 8
    assert {(job.passes, job.in_chain) for job in jobs} == {(("training",), False)}
    # What several sites may gain adds up.
    many = [_site(f"{i}", m=2000) for i in range(20)]
    jobs = jobs_worth_measuring([*sites, *many], _model())
    assert _rows(jobs) == [2000, 60_000, 1000]


def _rows(jobs):
    """Returns the rows of the sites of jobs, in their order."""
    return list(dict.fromkeys(job.spec.m for job in jobs))


def _found(job, us):
    return Table(HEADER, {job.spec: Entry({"training": {job.choice.name: us}})})


def test_idle_processes_are_spread_over_sites_and_xla_comes_first():
    agenda = Agenda([_site("a", m=1000), _site("b", m=60_000)], _model())
    jobs = [agenda.next_job() for _ in range(4)]
    assert [job.spec.m for job in jobs] == [60_000, 1000] * 2
    assert [job.choice == BF16 for job in jobs] == [True, True, False, False]
    # Those of XLA are not compared with the reference.
    assert [job.is_judged for job in jobs] == [False, False, True, True]
    # A site of which one is done has the fewest under way.
    agenda.learn(jobs[1], _found(jobs[1], 5.0))
    assert agenda.next_job().spec.m == 1000


def test_a_measurement_makes_others_superfluous():
    # A kernel of a tenth of what was predicted leaves nothing that may be faster.
    agenda = Agenda([_site("a")], _model())
    while (job := agenda.next_job()) is not None and job.choice == BF16:
        agenda.learn(job, _found(job, 100.0))
    agenda.learn(job, _found(job, 0.1))
    while (job := agenda.next_job()) is not None:
        assert not job.choice.is_fp8
        agenda.learn(job, _found(job, 100.0))


def test_measurements_are_kept_and_read_by_the_next_start(monkeypatch, tmp_path):
    cache, lines, calls, own = tmp_path / "cache.json", [], [], _site("a")
    monkeypatch.setattr(at_start, "cache_path", lambda: cache)

    def known():
        table = tables.read(cache) if cache.exists() else Table(header_here())
        return Local(PerformanceModel.of(table, fitted=fitted()))

    def measure_all(jobs, workers, say, *, seconds, turns):
        calls.append(seconds)
        for i, job in enumerate(itertools.takewhile(bool, jobs)):
            yield job, Entry({"training": {job.choice.name: 5.0 + i}})

    monkeypatch.setattr(at_start, "local_performance", known)
    monkeypatch.setattr(at_start, "measure_all", measure_all)
    # Two of one shape; on a head Dispatch does not decide.
    sites = [own, dataclasses.replace(own, path="b"), site("head", recipe="f32")]
    for _ in range(2):
        found = at_start.tune_at_start(sites, 30.0, name="m", say=lines.append)
        estimates = found.performance.estimates(own.spec)
        assert estimates.entry.times["training"][BF16.name] == 5.0
        assert estimates.spread("training", BF16) is None
    assert lines[0] == "m: tuning 2 sites, for 30 seconds at most."
    assert lines[1].startswith("m: 2 of 2 sites tuned in ")
    assert lines[2:] == ["m: all 2 sites are known, nothing is tuned."]
    assert calls == [30.0]


SITES = [
    *(_site(path, m=4096) for path in "ab"),
    site("c", m=4096, k=64, n=128),
    site("d", m=4096, k=64, n=256, recipe="f32"),
]


def _jobs(sites, timed=(), **options):
    config = TuneConfig(pairs=3, rows=17, **options)
    return list(jobs_of("model", sites, {"a": "stats"}, config, timed))


def test_each_shape_is_timed_once_and_errors_are_of_every_site():
    jobs = _jobs(SITES)
    of_errors = [job for job in jobs if job.choice is None]
    a, b, c = (job.spec for job in of_errors)
    assert a == b == table_key(SITES[0].spec) and _choices(jobs, a) == [
        *candidates(a, CPU)
    ]
    assert _choices(jobs, c)
    assert [job.stats for job in of_errors] == ["stats", None, None]
    assert [job.source for job in of_errors[:2]] == ["model a", "N(0, 1) for model b"]
    assert all((job.pairs, job.rows) == (3, 17) for job in of_errors)
    # Two batch sizes, one of which was timed.
    jobs = _jobs(SITES[2:3], timed=[c], batch_sizes=(4096, 128))
    assert _rows(jobs) == [4096, 128]
    assert {job.spec.m for job in jobs if job.choice is not None} == {128}


def _choices(jobs, spec):
    return [job.choice for job in jobs if job.spec == spec and job.choice is not None]


def test_a_table_has_the_times_and_the_effect_of_its_operands(monkeypatch):
    def measure_all(jobs, workers, say):
        assert workers == 3
        for job in jobs:
            times = {} if job.choice is None else {"training": {job.choice.name: 1.0}}
            yield job, Entry(times)

    monkeypatch.setattr(tuning, "measure_all", measure_all)
    effects = dict.fromkeys("ac", Interval(1e-4, -1e-5, 2e-4))
    config = TuneConfig(workers=3)
    found = list(tune("model", SITES, {"a": None}, config, effects=effects))
    merged = functools.reduce(Table.merged, found)
    first, third = (merged.sites[table_key(SITES[i].spec)] for i in (0, 2))
    assert BF16.name in first.times["training"]
    assert first.effects == {"model a": effects["a"]}
    assert third.effects == {"N(0, 1) for model c": effects["c"]}


# What a plan chose by prediction is checked before it runs, or does not run.

SPEC = SiteSpec(65_000, 512, 512, "layer", "swish")
FIRST, SECOND = Choice.parse(FP8_KERNEL), Choice.parse(KERNEL)


def _large(path, **options):
    return site(path, 65_000, 512, 512, norm="layer", activation="swish", **options)


PAIR = [_large("a"), _large("b")]


@pytest.fixture
def performance():
    """Returns predictions on this machine."""
    return PerformanceModel.of(Table(header_here()), fitted=fitted())


def plan_of(performance):
    """Returns the first choice, or the second, or XLA's bfloat16: what did not fail."""
    estimates = performance.estimates(SPEC)
    failures = estimates.entry.failures
    choice = next(c for c in (FIRST, SECOND, BF16) if c.name not in failures)
    decision = Decision(choice, "", spread=estimates.spread("training", choice))
    return DispatchPlan(tuple((x.path, decision) for x in PAIR))


BUDGET = Budget(30.0)


def check(performance, plan=plan_of, budget=BUDGET, say=lambda _: None, **options):
    return check_plan(plan, PAIR, performance, budget, say, **options)


@pytest.fixture
def workers(monkeypatch, tmp_path):
    """Stands in for worker processes, in which some candidates are wrong."""
    path, asked, wrong = tmp_path / "cache.json", [], {}
    monkeypatch.setattr(at_start, "cache_path", lambda: path)

    def measure_all(jobs, count, say, *, seconds, turns):
        assert 0 < seconds <= 30
        for job in jobs:
            asked.append(job.choice)
            why = wrong.get(job.choice)
            failures = {} if why is None else {job.choice.name: why}
            (name,) = job.passes
            times = {name: {job.choice.name: 5.0}} if why is None else {}
            yield job, Entry(times, failures=failures)

    monkeypatch.setattr(at_start, "measure_all", measure_all)
    return path, asked, wrong


def _choice(checked):
    (choice,) = {decision.choice for _, decision in checked.plan.decisions}
    return choice


def test_a_predicted_choice_is_checked_once_and_kept(workers, performance):
    path, asked, _ = workers
    said = []
    checked = check(performance, say=said.append)
    assert _choice(checked) == FIRST and not checked.notes
    assert asked == [FIRST, BF16]
    assert len(said) == 1 and "2 kernels" in said[0]
    times = tables.read(path).sites[SPEC].times["training"]
    assert times == {FIRST.name: 5.0, BF16.name: 5.0}
    again = check(checked.performance, say=said.append)
    assert _choice(again) == FIRST and len(asked) == 2 and len(said) == 1


def test_what_is_wrong_makes_way_for_the_next_and_without_memory_is_checked_again(
    workers, performance
):
    path, asked, wrong = workers
    wrong[FIRST] = "y is off"
    checked = check(performance)
    assert _choice(checked) == SECOND and not checked.notes
    assert asked == [FIRST, BF16, SECOND]
    path.unlink()
    wrong[FIRST] = NO_MEMORY
    checked = check(performance)
    assert _choice(checked) == SECOND and "2 sites" in checked.notes[0]
    assert not tables.read(path).sites[SPEC].failures
    wrong.clear()
    asked.clear()
    again = check(performance.with_table(tables.read(path)))
    assert _choice(again) == FIRST and asked == [FIRST] and not again.notes


# Both sites may run twice as fast by a kernel. A run waits for its check if that saves
# more than the check takes, and without a run it is checked in any case.
@pytest.mark.parametrize(
    "share, is_checked", [(None, True), (1.01, True), (0.99, False)]
)
def test_what_may_be_faster_is_measured_before_the_plan_is_made_if_it_pays(
    workers, performance, share, is_checked
):
    _, asked, _ = workers

    def ratio(model):
        times = model.estimates(SPEC).entry.times["training"]
        return times[SECOND.name] / times[BF16.name]

    predicted = ratio(performance)

    def leaves_xla_for_less(model):
        fast = ratio(model) < 0.99 * predicted
        decision = Decision(SECOND, "", speedup=2.0) if fast else Decision(BF16, "")
        return DispatchPlan(tuple((x.path, decision) for x in PAIR))

    saved_us = sum(bf16_us(site, performance) / 2 for site in PAIR)
    enough = check_seconds(2) * 1e6 / saved_us
    steps = None if share is None else round(share * enough)
    checked = check(performance, leaves_xla_for_less, Budget(30.0, steps=steps))
    # Measured, both take 5 us: more than the ratio for which it leaves XLA.
    assert asked == ([SECOND, BF16] if is_checked else [])
    assert _choice(checked) == BF16 and not checked.notes


def test_an_inference_plan_is_checked_by_times_of_inference(workers):
    _, asked, _ = workers
    fit = fitted()
    for entry in fit.sites.values():
        entry.times["inference"] = entry.times["training"]
    known = Entry({"training": {FIRST.name: 4.0, BF16.name: 5.0}})
    known = PerformanceModel.of(Table(header_here(), {SPEC: known}), fitted=fit)
    check(known)
    assert not asked
    checked = check(known, pass_name="inference")
    assert asked == [FIRST, BF16]
    times = checked.performance.table.sites[SPEC].times["inference"]
    assert times == {FIRST.name: 5.0, BF16.name: 5.0}


def test_what_was_not_checked_does_not_run(workers, performance, monkeypatch):
    monkeypatch.setattr(at_start, "measure_all", lambda *args, **kwargs: [])
    checked = check(performance, budget=Budget(1e-9))
    assert _choice(checked) == BF16
    assert "not checked within 1e-09 seconds" in checked.notes[0]


def test_kernels_of_a_chain_are_checked_as_parts_of_it(performance):
    chain = in_a_row(PAIR[0], _large("b"))
    jobs = unchecked([plan_of(performance)], chain, performance, "training")
    found = [(job.choice, job.in_chain) for job in jobs]
    assert found == [(FIRST, True), (BF16, False)]
