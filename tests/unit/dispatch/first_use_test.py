"""What a plan chose by prediction is checked before it runs, or does not run."""

import pytest

from loka_jax.dispatch import at_start
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.first_use import check_plan, unchecked
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.dispatch.table import Entry, Table
from loka_jax.measure.checking import NO_MEMORY
from loka_jax.site import BF16, Choice, SiteSpec
from tests.support.dispatch import fitted, site

SPEC = SiteSpec(65_000, 512, 512, "layer", "swish")
FIRST, SECOND = Choice.parse("pallas fp8_rowwise"), Choice.parse("pallas bf16")


def _site(path, **options):
    return site(path, 65_000, 512, 512, norm="layer", activation="swish", **options)


SITES = [_site("a"), _site("b")]


@pytest.fixture
def performance():
    """Returns predictions on this machine."""
    return PerformanceModel(Table(header_here()), fitted=fitted())


def plan_of(performance):
    """Returns the first choice, or the second, or XLA's bfloat16: what did not fail."""
    estimates = performance.estimates(SPEC)
    failures = estimates.entry.failures
    choice = next(c for c in (FIRST, SECOND, BF16) if c.name not in failures)
    decision = Decision(choice, "", spread=estimates.spread("training", choice))
    return DispatchPlan(tuple((x.path, decision) for x in SITES))


def check(performance, plan=plan_of, seconds=30.0, say=lambda line: None, **options):
    return check_plan(plan, SITES, performance, seconds, say, **options)


@pytest.fixture
def workers(monkeypatch, tmp_path):
    """Stands in for worker processes, in which some candidates are wrong."""
    path, asked, wrong = tmp_path / "cache.json", [], {}
    monkeypatch.setattr(at_start, "cache_path", lambda: path)

    def measure_all(jobs, count, say, *, seconds):
        assert 0 < seconds <= 30
        for job in jobs:
            (choice,) = job.choices
            asked.append(choice)
            why = wrong.get(choice)
            failures = {} if why is None else {choice.name: why}
            times = {"training": {choice.name: 5.0}} if why is None else {}
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


def test_what_may_be_faster_is_measured_before_the_plan_is_made(workers, performance):
    _, asked, _ = workers

    def ratio(model):
        times = model.estimates(SPEC).entry.times["training"]
        return times[SECOND.name] / times[BF16.name]

    predicted = ratio(performance)

    def leaves_xla_for_less(model):
        choice = SECOND if ratio(model) < 0.99 * predicted else BF16
        return DispatchPlan(tuple((x.path, Decision(choice, "")) for x in SITES))

    checked = check(performance, leaves_xla_for_less)
    # Measured, both take 5 us: more than the ratio for which it leaves XLA.
    assert asked == [SECOND, BF16]
    assert _choice(checked) == BF16 and not checked.notes


def test_an_inference_plan_is_checked_by_times_of_inference(performance):
    fit = fitted()
    for entry in fit.sites.values():
        entry.times["inference"] = entry.times["training"]
    known = Entry({"training": {FIRST.name: 4.0, BF16.name: 5.0}})
    known = PerformanceModel(Table(header_here(), {SPEC: known}), fitted=fit)
    asked = []

    def measure(jobs, seconds):
        for job in jobs:
            times = {name: {job.choices[0].name: 5.0} for name in job.passes}
            asked.append((*job.choices, job.passes))
            yield job, Table(header_here(), {SPEC: Entry(times)})

    for name in ("training", "inference"):
        check(known, pass_name=name, measure=measure)
        assert name == "inference" or asked == []
    assert asked == [(FIRST, ("inference",)), (BF16, ("inference",))]


def test_what_was_not_checked_does_not_run(workers, performance, monkeypatch):
    monkeypatch.setattr(at_start, "measure_all", lambda *args, **kwargs: [])
    checked = check(performance, seconds=1e-9)
    assert _choice(checked) == BF16
    assert "not checked within 1e-09 seconds" in checked.notes[0]


def test_kernels_of_a_chain_are_checked_as_parts_of_it(performance):
    chain = [SITES[0], _site("b", follows=True)]
    jobs = unchecked([plan_of(performance)], chain, performance, "training")
    found = [(*job.choices, job.in_chain, job.digests, job.pairs) for job in jobs]
    assert found == [(FIRST, True, False, 0), (BF16, False, False, 0)]
