"""What is measured of candidates at a site, in which order, and in which turn."""

import contextlib
import types
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest

from loka_jax.dispatch import measuring
from loka_jax.dispatch.measuring import GpuUse, Job, measure_site
from loka_jax.dispatch.table import MEASURES, Entry
from loka_jax.measure import programs
from loka_jax.measure.checking import Check
from loka_jax.measure.compiling import NO_CAPTURE, UNTUNED, Lowered
from loka_jax.measure.intervals import Interval
from loka_jax.measure.programs import Inputs
from loka_jax.measure.timing import KernelTime
from loka_jax.normed import NO_VECTORS
from loka_jax.recipe import ROLES
from loka_jax.site import Choice, SiteSpec
from tests.support import stand_ins

SPEC = SiteSpec(4096, 256, 512, "layer", "swish")
XLA, ROW = "xla bf16", "xla fp8_rowwise"
KERNEL, FP8, TENSOR = "pallas bf16", "pallas fp8_rowwise", "xla fp8_tensorwise"
NO_ERRORS = {role: {} for role in ROLES}


class _Compiled(NamedTuple):
    name: str

    def __call__(self, *arguments):
        return [np.zeros(1)]


class _Check(Check):
    """The programs of a candidate, and what is wrong with it, if anything."""

    wrong: str | None = None
    log: list = []

    def why_wrong(self, compiled):
        names = {program.name.partition(" ")[0] for program in compiled.values()}
        self.log.append(f"check {sorted(names)}")
        return self.wrong

    def draw(self, compiled, count):
        return [types.SimpleNamespace(g=np.ones(2))] * count

    def inputs(self, compiled, trials):
        return [Inputs(np.ones(3), None, np.ones(4), NO_VECTORS, None)] * len(trials)


@pytest.fixture
def bench(monkeypatch):
    """Measures jobs on a stand-in for a Hopper GPU, and notes in which order."""
    bench = Bench()
    for module in (measuring, programs):
        monkeypatch.setattr(module, "local_device", lambda: stand_ins.HOPPER)
    monkeypatch.setattr(measuring, "compile_lowered", bench.compile_lowered)
    monkeypatch.setattr(measuring, "time_kernels", bench.time_kernels)
    monkeypatch.setattr(measuring, "lower_check", bench.check)
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
        names = ", ".join(sorted({name.partition(":")[2] for name in lowered}))
        self.log.append(f"compile {tuned} {len(lowered)} of {names}")
        error = dict.fromkeys(self.broken, ValueError("too\nlarge"))
        return {name: error.get(name, _Compiled(name)) for name in lowered}

    def time_kernels(self, cases):
        self.log.append(f"time {len(cases)}")
        names = {program: program.name.partition(":") for program in cases}
        us = {
            x: 10 * len(name) + len(form.split())
            for x, (form, _, name) in names.items()
        }
        return {x: KernelTime(time + 0.004, 0.0, 1e9, None) for x, time in us.items()}

    def check(self, spec, choice):
        """Returns the check of a candidate."""
        form = (" in" if spec.fp8_in else "") + (" out" if spec.out == "fp8" else "")
        self.log.append(f"lower {choice.name}{form}")
        timed = ("training", "prepare", "inference")
        lowered = {x: Lowered(x, UNTUNED) for x in ("draw", "begin", "judge")}
        lowered |= {x: Lowered(x, NO_CAPTURE) for x in timed}
        check = _Check(None, lowered, self.refused.get(choice.name))
        check.wrong, check.log = self.wrong.get(choice.name + form), self.log
        return check

    @contextlib.contextmanager
    def turn(self, kind):
        self.log.append(f"<{kind}>")
        yield
        self.log.append(f"</{kind}>")

    def measure(self, *names, begin=lambda name: None, **options):
        """Returns the measurements of candidates by name."""
        options = {"in_chain": False} | options
        job = Job(SPEC, tuple(map(Choice.parse, names)), source="s", **options)
        gpu = GpuUse(lambda: self.turn("together"), lambda: self.turn("alone"))
        return measure_site(job, begin, gpu)


def test_the_gpu_is_used_in_turn(bench):
    entry = bench.measure(XLA, ROW, pairs=2)
    own = f"{XLA}, {ROW}"
    checked = "check ['begin', 'draw', 'inference', 'judge', 'prepare', 'training']"
    assert bench.log == [
        *("<together>", "</together>"),  # errors
        *(f"lower {XLA}", f"lower {ROW}"),
        f"compile untuned 8 of {own}",  # prepare is not timed
        "<together>",
        f"compile tuned 4 of {own}",
        *(checked, checked),
        "</together>",
        *("<alone>", "time 4", "</alone>"),
    ]
    # Rounded, so that a table can be read.
    times = dict.fromkeys(("training", "inference"), {XLA: 81.0, ROW: 151.0})
    assert entry == Entry(times, {"s": NO_ERRORS})


def test_what_is_not_asked_for_is_not_measured(bench):
    entry = bench.measure(XLA, passes=("training",), is_judged=False)
    assert entry == Entry({"training": {XLA: 81.0}})
    assert bench.log[3] == "compile untuned 4 of xla bf16"
    assert not any(line.startswith("check") for line in bench.log)
    bench.log.clear()
    assert bench.measure(pairs=1) == Entry(errors={"s": NO_ERRORS})
    assert bench.log == ["<together>", "</together>"]


def test_who_is_wrong_has_no_time(bench):
    bench.wrong[ROW] = "y is off"
    bench.refused[FP8] = "does not compile: why"
    bench.broken = (f"inference :{KERNEL}",)
    entry = bench.measure(XLA, ROW, FP8, KERNEL, "pallas fp8_blockwise")
    failures = entry.failures
    assert failures.pop("pallas fp8_blockwise").startswith("does not run: ")
    assert failures == {
        ROW: "y is off",
        FP8: "does not compile: why",
        KERNEL: "does not compile: ValueError: too large",
    }
    assert entry.times["training"].keys() == {XLA}
    # Without a right one nothing is timed.
    bench.wrong[XLA] = "y is off"
    bench.log.clear()
    assert bench.measure(XLA).times == {} and "<alone>" not in bench.log


def test_in_a_serial_job_each_is_named_before_it_is_compiled(bench):
    said = []
    bench.measure(XLA, ROW, begin=said.append, is_serial=True)
    assert said == ["", *[XLA, ROW] * 4, ""]  # lowered, compiled twice, checked


def test_kernels_are_timed_in_chains_too_if_right_in_each(bench):
    entry = bench.measure(XLA, KERNEL, FP8, in_chain=True)
    # The kernel in bfloat16 reads no FP8; the last form is checked.
    forms = {KERNEL: [" out"], FP8: [" out", " in", " in out"]}
    lowered = [line for line in bench.log if line.startswith("lower")][3:]
    assert lowered == [f"lower {x}{form}" for x, own in forms.items() for form in own]
    assert entry.times["training out"] == {KERNEL: 112.0, FP8: 182.0}
    assert entry.times["training in"] == {FP8: 182.0}
    assert entry.times["inference in out"] == {FP8: 183.0}
    assert sum(line.startswith("check") for line in bench.log) == 5
    bench.wrong[f"{FP8} out"] = "y is off"  # not the last form: not checked
    assert not bench.measure(XLA, FP8, in_chain=True).failures
    bench.wrong[f"{FP8} in out"] = "y is off"
    entry = bench.measure(XLA, FP8, in_chain=True)
    assert entry.failures == {FP8: "y is off, in chains"}
    assert not any(FP8 in times for times in entry.times.values())


def test_errors_that_a_table_keeps_are_finite_and_of_xla(monkeypatch):
    good = dict.fromkeys(MEASURES, Interval(0.0123456, 0.01, 0.0201234))
    bad = good | {"mere": Interval(0.1, 0.0, float("inf"))}
    found = {XLA: good, ROW: good | {"median": good["mere"]}, FP8: good, TENSOR: bad}
    by_role = {role: {x: {"drawn": y} for x, y in found.items()} for role in ROLES}
    site_errors = mock.Mock(return_value=by_role)
    monkeypatch.setattr(measuring, "site_errors", site_errors)
    job = Job(SPEC, (), pairs=3, rows=99)
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
