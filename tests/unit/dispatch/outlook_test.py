"""What a plan gains, or what keeps FP8 out of it, is said in a sentence."""

import dataclasses
import functools

import jax
import pytest

from loka_jax.dispatch.first_use import (
    IN_TIME,
    NOT_CHECKED,
    as_if_accurate,
    check_seconds,
)
from loka_jax.dispatch.outlook import (
    Remedies,
    entering,
    last_line,
    seconds_of,
    steps_meanwhile,
    with_rows,
)
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan, make_plan
from loka_jax.dispatch.table import Entry, Table
from loka_jax.site import BF16
from tests.support.dispatch import HEADER, ROW, errors, fitted, in_a_row, model_of, site

REMEDIES = Remedies("LOOK", "WAIT", "NAME")
PAIR = [site("a"), site("b")]
FAST = model_of(PAIR, {BF16.name: 2.0, ROW: 1.0})


def line_of(sites, performance, found=None):
    make = functools.partial(make_plan, config="run")
    own = {} if found is None else {each.path: found for each in sites}

    def remade(sites, known, errors=own):
        return make(sites, known, errors=errors)

    plan = remade(sites, performance)
    return last_line(plan, sites, performance, remade, REMEDIES)


@pytest.mark.parametrize(
    "sites, performance, found, said",
    [
        (PAIR, FAST, errors(rowwise=0.01), ["2 of 2 sites run in FP8", "100% faster"]),
        (PAIR, FAST, None, ["not known at 2 sites", "100% faster; LOOK"]),
        (PAIR, FAST, errors(rowwise=1.0), ["at 2 sites", "above the limits (a: xla"]),
        ([site("a", recipe="bf16")], FAST, None, ["all recipes are bf16; NAME"]),
        ([site("a", recipe="f32")], FAST, None, ["no product of data and a weight"]),
    ],
)
def test_the_last_line(sites, performance, found, said):
    line = line_of(sites, performance, found)
    assert line.startswith("No site runs in FP8: ") or line.startswith("2 of 2")
    assert all(text in line for text in said), line


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (f"{IN_TIME} 5 s", f"may be faster {NOT_CHECKED} within 5 s; WAIT."),
        ("for it", f"may be faster {NOT_CHECKED} for it."),
    ],
)
def test_what_was_not_checked_is_said(why, said):
    failures = {ROW: f"{NOT_CHECKED} {why}"}
    entry = Entry({"training": {BF16.name: 2.0}}, failures=failures)
    known = PerformanceModel.of(Table(HEADER, {PAIR[0].spec: entry}))
    assert said in line_of(PAIR[:1], known)


def test_a_larger_batch_is_tried():
    # On the copier a kernel in FP8 pays where copies outweigh its launch.
    small = site("a", 1024, 256, 128, norm="layer", activation="swish")
    known = PerformanceModel.of(Table(HEADER), fitted=fitted())
    times = known.estimates(small.spec).entry.times["training"]
    slow = {name: times[BF16.name] for name in times}
    known = known.with_table(Table(HEADER, {small.spec: Entry({"training": slow})}))
    line = line_of([small], known, errors(rowwise=0.01))
    assert "not faster at these rows; a batch 4 times as large would run" in line


def test_without_a_gpu_there_are_no_times():
    line = last_line(DispatchPlan(), PAIR, None, make_plan, REMEDIES)
    kind = jax.devices()[0].platform.upper()
    assert line.startswith(f"FP8 gains nothing here, as a {kind} only emulates it")


def test_a_site_with_other_rows_has_its_group_with_these_rows():
    first, second = (with_rows(each, 0.25) for each in in_a_row(*PAIR))
    assert first.spec == dataclasses.replace(PAIR[0].spec, m=32)
    assert first.group == second.group and first.group.rows == 32
    assert {member.spec.m for member in first.group.members} == {32}
    assert second.follows


def test_entering_pays_if_it_saves_more_than_it_costs():
    slow = make_plan(PAIR, FAST)
    fast = make_plan(PAIR, FAST, errors=as_if_accurate(PAIR))
    worth = functools.partial(entering, PAIR, FAST, slow, fast)
    found = worth(1_000_000, waits=seconds_of(PAIR, 2))
    assert (found.saves, found.pays) == (pytest.approx(2.0), False)
    assert found.costs == pytest.approx((2 * 0.9 + 0.2) * len(PAIR))
    assert worth(1_000_000, waits=0.0).pays and not worth(100_000, waits=0.0).pays
    assert worth(-1, waits=0.0).saves == 0
    assert str(found) == (
        "FP8 may save 2 s of the rest of the run, and entering it takes some 4 s"
    )
    assert seconds_of(PAIR, 2, kernels=5) == seconds_of(PAIR, 2) + check_seconds(5)
    assert steps_meanwhile(PAIR, FAST, slow, seconds=1.5e-3) == 250  # of 4 us
