"""What is measured of candidates at a site, in which order, and in which turn."""

import contextlib
from typing import NamedTuple
from unittest import mock

import pytest

from loka_jax.dispatch import measuring
from loka_jax.dispatch.measuring import Job, measure_site
from loka_jax.dispatch.table import MEASURES, Entry
from loka_jax.measure import programs
from loka_jax.measure.checking import Check
from loka_jax.measure.compiling import NO_CAPTURE, UNTUNED, Lowered
from loka_jax.measure.intervals import Interval
from loka_jax.measure.timing import Timing
from loka_jax.recipe import ROLES
from loka_jax.site import Choice, SiteSpec
from tests.support import stand_ins

SPEC = SiteSpec(4096, 256, 512, "layer", "swish")
XLA, ROW = "xla bf16", "xla fp8_rowwise"
KERNEL, FP8, TENSOR = "pallas bf16", "pallas fp8_rowwise", "xla fp8_tensorwise"
PASSES = ("training", "inference")
NO_ERRORS = {role: {} for role in ROLES}


class _Compiled(NamedTuple):
    name: str


class _Check(Check):
    """The programs of a candidate, and what is wrong with it, if anything."""

    wrong: str | None = None
    log: list = []

    def why_wrong(self, compiled):
        self.log.append(f"check {sorted(compiled)}")
        return self.why_not_compiled(compiled) or self.wrong


@pytest.fixture
def bench(monkeypatch):
    """Measures jobs on a stand-in for a Hopper GPU, and notes in which order."""
    bench = Bench()
    monkeypatch.setattr(programs, "local_device", lambda: stand_ins.HOPPER)
    for name in ("compile_lowered", "time_kernels", "lower_check", "operand_sets"):
        monkeypatch.setattr(measuring, name, getattr(bench, name))
    monkeypatch.setattr(measuring, "measure_errors", lambda job: NO_ERRORS)
    return bench


class Bench:
    """What was done while jobs were measured, and what is wrong with candidates."""

    def __init__(self):
        self.log, self.wrong, self.broken, self.refused = [], {}, (), {}

    def compile_lowered(self, lowered):
        if not lowered:
            return {}
        tuned = "tuned" if next(iter(lowered.values())).is_tuned else "untuned"
        self.log.append(f"compile {tuned} {' '.join(sorted(lowered))}")
        error = dict.fromkeys(self.broken, ValueError("too\nlarge"))
        return {name: error.get(name, _Compiled(name)) for name in lowered}

    def operand_sets(self, compiled, count):
        return dict.fromkeys(compiled, [()] * count)

    def time_kernels(self, cases):
        self.log.append(f"time {' '.join(cases)}")
        return {name: Timing(len(name) + 0.004, 0.0, 1e9, None) for name in cases}

    def lower_check(self, spec, choice):
        form = (" in" if spec.fp8_in else "") + (" out" if spec.out == "fp8" else "")
        self.log.append(f"lower{form}")
        timed = ("training", "prepare", "inference")
        lowered = {x: Lowered(x, UNTUNED) for x in ("draw", "begin", "judge")}
        lowered |= {x: Lowered(x, NO_CAPTURE) for x in timed}
        check = _Check(None, lowered, self.refused.get(choice.name))
        check.wrong, check.log = self.wrong.get(form.strip()), self.log
        return check

    @contextlib.contextmanager
    def turn(self, kind):
        self.log.append(f"<{kind}>")
        yield
        self.log.append(f"</{kind}>")

    def measure(self, name, **options):
        """Returns the measurements of a candidate by name, or of errors."""
        choice = None if name is None else Choice.parse(name)
        return measure_site(Job(SPEC, choice, source="s", **options), self.turn)


def test_the_gpu_is_used_in_turn(bench):
    entry = bench.measure(ROW)
    assert bench.log == [
        "lower",
        "compile untuned begin draw judge prepare",  # prepare is not timed
        "<together>",
        "compile tuned inference training",
        "check ['begin', 'draw', 'inference', 'judge', 'prepare', 'training']",
        "</together>",
        *("<alone>", "time training inference", "</alone>"),
    ]
    # Rounded, so that a table can be read.
    assert entry == Entry({"training": {ROW: 8.0}, "inference": {ROW: 9.0}})
    bench.log.clear()
    assert bench.measure(None, pairs=2) == Entry(errors={"s": NO_ERRORS})
    assert bench.log == ["<together>", "</together>"]


def test_what_is_not_asked_for_is_not_measured(bench):
    entry = bench.measure(XLA, passes=("training",), is_judged=False)
    assert entry == Entry({"training": {XLA: 8.0}})
    assert bench.log[1] == "compile untuned begin draw inference prepare"
    assert not any(line.startswith("check") for line in bench.log)


def test_who_is_wrong_has_no_time(bench):
    bench.wrong[""] = "y is off"
    assert bench.measure(ROW) == Entry(failures={ROW: "y is off"})
    bench.broken = ("inference",)
    failure = "does not compile: ValueError: too large"
    for is_judged in (True, False):
        entry = bench.measure(KERNEL, is_judged=is_judged)
        assert entry == Entry(failures={KERNEL: failure})
    bench.refused[FP8] = "does not run: why"
    assert bench.measure(FP8) == Entry(failures={FP8: "does not run: why"})
    assert "<alone>" not in bench.log


def test_kernels_are_timed_in_chains_too_if_right_in_each(bench):
    forms = {XLA: [""], KERNEL: ["", " out"], FP8: ["", " out", " in", " in out"]}
    for name, own in forms.items():  # the kernel in bfloat16 reads no FP8
        bench.log.clear()
        entry = bench.measure(name, in_chain=True)
        assert entry.times.keys() == {
            f"{pass_name}{form}" for pass_name in PASSES for form in own
        }
        lowered = [line for line in bench.log if line.startswith("lower")]
        assert lowered == [f"lower{form}" for form in own]
        # Alone, and in the last form.
        checks = sum(line.startswith("check") for line in bench.log)
        assert checks == min(len(own), 2)
    bench.wrong["out"] = "y is off"  # not the last form: not checked
    assert bench.measure(FP8, in_chain=True).times
    bench.wrong["in out"] = "y is off"
    entry = bench.measure(FP8, in_chain=True)
    assert entry == Entry(failures={FP8: "y is off, in chains"})


def test_errors_that_a_table_keeps_are_finite_and_of_xla(monkeypatch):
    good = dict.fromkeys(MEASURES, Interval(0.0123456, 0.01, 0.0201234))
    bad = good | {"mere": Interval(0.1, 0.0, float("inf"))}
    found = {XLA: good, ROW: good | {"median": good["mere"]}, FP8: good, TENSOR: bad}
    by_role = {role: {x: {"drawn": y} for x, y in found.items()} for role in ROLES}
    site_errors = mock.Mock(return_value=by_role)
    monkeypatch.setattr(measuring, "site_errors", site_errors)
    job = Job(SPEC, None, pairs=3, rows=99)
    kept = dict.fromkeys(MEASURES, Interval(0.01235, 0.01, 0.02012))
    expected = {role: {"bf16": kept, "fp8_rowwise": kept} for role in ROLES}
    assert measuring.measure_errors(job) == expected
    measuring.measure_errors(job._replace(stats="stats", rows=9999))
    options = {"sizes": (99, 256, 512)}, {"stats": "stats", "rows": 4096}
    for call, keywords in zip(site_errors.call_args_list, options, strict=True):
        spec, sources, recipes = call.args
        ((draw, keys),) = sources.values()
        assert (spec, draw.keywords, len(keys)) == (SPEC, keywords, 3)
        assert "bf16" not in recipes
