"""What is measured of candidates at a site, on a CPU."""

import contextlib

import pytest

from loka_jax.dispatch.measuring import GpuUse, Job, measure_errors, measure_site
from loka_jax.measure import checking, passes
from loka_jax.ops.run_site import run_site
from loka_jax.probe.site import ProbeConfig, empty_stats, observe
from loka_jax.recipe import ROLES
from loka_jax.site import Choice, SiteSpec
from tests import support

SITE = SiteSpec(64, 32, 16, "layer", "swish")
NAMES = ("xla bf16", "xla fp8_rowwise", "xla fp8_tensorwise_delayed/bf16/bf16")


def _job(*names, stats=None):
    choices = tuple(map(Choice.parse, names or NAMES))
    return Job(SITE, choices, stats, "model dense", pairs=2, rows=32, seed=0)


class _Finds(checking.Check):
    """The programs of a candidate, with a finding that no comparison made."""

    reason: str | None = None

    def why_wrong(self, compiled):
        return self.reason


def _found(spec, choice, reason):
    numerics, programs, refusal = checking.lower_check(spec, choice)
    passes = {name: x for name, x in programs.items() if name != "judge"}
    check = _Finds(numerics, passes, refusal)
    check.reason = reason
    return check


def _right(spec, choice):
    """A check that finds nothing; that which is used is tested by itself."""
    return _found(spec, choice, None)


@pytest.fixture(scope="module")
def entry():
    return measure_site(_job(), lambda name: None, check=_right)


def test_all_candidates_have_times_of_both_passes(entry):
    for what in ("training", "inference"):
        assert set(entry.times[what]) == set(NAMES)
        assert all(time > 0 for time in entry.times[what].values())
    assert entry.failures == {}


def test_only_the_passes_of_a_job_are_timed():
    job = _job("xla bf16")._replace(passes=("training",), in_chain=False)
    assert set(measured(job).times) == {"training"}


def test_products_have_errors_with_intervals(entry):
    errors = entry.errors["model dense"]
    assert set(errors) == set(ROLES)
    found = errors["fwd"]["fp8_rowwise"]["relative_l2"]
    assert found.low <= found.mean <= found.high and 0.01 < found.mean < 0.06


@pytest.mark.slow
def test_errors_are_those_of_what_probe_learned():
    # Operands near one, which FP8 holds nearly exactly: N(0, 1) would say otherwise.
    lhs, rhs, g = (
        1 + 1e-3 * support.normal(*size) for size in ((64, 32), (32, 16), (64, 16))
    )
    stats = empty_stats(32, 16, ProbeConfig())
    seen = observe(stats, lhs, rhs, g, (None,) * 3, ProbeConfig())
    errors = measure_errors(_job("xla bf16", stats=seen))
    assert errors["fwd"]["fp8_rowwise"]["relative_l2"].mean < 0.01


def measured(job, begin=lambda name: None, check=_right):
    """Returns the entry without errors, whose compilation takes most of the time."""
    no_errors = {role: {} for role in ROLES}
    return measure_site(job, begin, errors_of=lambda job: no_errors, check=check)


def test_who_is_wrong_has_no_time():
    def check(spec, choice):
        is_wrong = choice.recipe.name == "fp8_rowwise"
        return _found(spec, choice, "y is wrong" if is_wrong else None)

    found = measured(_job("xla bf16", "xla fp8_rowwise"), check=check)
    assert set(found.times["training"]) == {"xla bf16"}
    assert found.failures == {"xla fp8_rowwise": "y is wrong"}


@pytest.mark.slow
def test_the_check_runs_the_candidates(monkeypatch):
    def doubled(plan, *args, **kwargs):
        out = run_site(plan, *args, **kwargs)
        return out * 2 if plan.choice.recipe.name == "fp8_rowwise" else out

    monkeypatch.setattr(passes, "run_site", doubled)
    names = ("xla bf16", "xla fp8_rowwise")
    found = measured(_job(*names), check=checking.lower_check)
    assert set(found.times["training"]) == {"xla bf16"}
    assert "too large" in found.failures["xla fp8_rowwise"]


def test_kernels_that_do_not_run_here_fail_with_a_reason():
    spec = SiteSpec(64, 64, 64, "layer", "swish")
    job = _job("xla bf16", "pallas bf16")._replace(spec=spec)
    found = measured(job)
    assert "no Hopper GPU" in found.failures["pallas bf16"]
    assert set(found.times["training"]) == {"xla bf16"}


def test_times_that_are_known_are_not_taken_again():
    found = measured(_job()._replace(choices=()))
    assert found.times == {} and set(found.errors["model dense"]) == set(ROLES)


def test_the_gpu_is_used_in_turn():
    using, log = [], []

    @contextlib.contextmanager
    def turn(kind):
        assert not using, using
        using.append(kind)
        log.append(kind)
        yield
        using.clear()

    def check(spec, choice):
        assert not using  # lowering needs no turn
        return _right(spec, choice)

    gpu = GpuUse(lambda: turn("together"), lambda: turn("alone"))
    job = _job("xla bf16")._replace(pairs=0, digests=False)
    entry = measure_site(job, lambda name: None, gpu, check=check)
    assert log[:3] == ["together", "together", "alone"] and entry.programs == {}


def test_the_parts_of_a_job_measure_the_same():
    job = _job()
    first, second = job.split(2)
    assert {*first.choices, *second.choices} == set(job.choices)
    assert (first.pairs, second.pairs) == (job.pairs, 0)
    assert job._replace(choices=()).split(4) == [job._replace(choices=())]


def test_it_is_told_who_is_next():
    said = []
    measured(_job("xla bf16", "xla fp8_rowwise")._replace(is_serial=True), said.append)
    assert said[0] == "" and said[-1] == ""
    assert set(said) == {"", "xla bf16", "xla fp8_rowwise"}
    assert said.index("xla bf16") < said.index("xla fp8_rowwise")
