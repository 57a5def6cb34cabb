"""What live errors change in a plan."""

import pytest

from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision, Limits, shares_of_limits
from loka_jax.dispatch.review import Reviewer
from loka_jax.dispatch.table import MEASURES, Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.nn import Site
from loka_jax.ops.plan import resolve
from loka_jax.recipe import ROLES
from loka_jax.site import BF16, Choice, SiteSpec
from tests.support import stand_ins

ROW, TENSOR = "xla fp8_rowwise", "xla fp8_tensorwise"
TIMES = {BF16.name: 2.0, ROW: 1.0, TENSOR: 0.9}
PATH = "top/dense_0"
# Of N(0, 1): 0.037, of which the limit is the 1.5-fold.
GOOD, NEAR, BAD = 0.03, 0.05, 0.2


def _site(path=PATH, n=64) -> Site:
    plan = resolve(SiteSpec(128, 64, n), Choice.parse(ROW), stand_ins.CPU)
    return Site(path=path, plan=plan)


def _reviewer(sites, times=TIMES, **options) -> Reviewer:
    entry = Entry({"training": times}, {"N(0, 1)": {}})
    table = Table(
        Header("cpu", "1", "1", "", "x"), {table_key(x.spec): entry for x in sites}
    )
    return Reviewer(sites, PerformanceModel(table), config="model", **options)


def _errors(**values):
    """Returns errors by the last word of a recipe's name, the same in all roles."""
    of_recipes = {
        f"fp8_{name}": dict.fromkeys(MEASURES, Interval(x, x, x))
        for name, x in values.items()
    }
    return {role: of_recipes for role in ROLES}


def _plan(**choices) -> DispatchPlan:
    made = {
        path: Decision(Choice.parse(name), "at first", speedup=2.0 / TIMES[name])
        for path, name in choices.items()
    }
    return DispatchPlan(tuple(made.items()))


def test_sites_are_promoted_and_demoted_by_their_own_errors():
    sites = [_site(name, n=64 * (i + 1)) for i, name in enumerate("abc")]
    times = {BF16.name: 2.0, ROW: 1.0}
    plan = _plan(a=BF16.name, b=ROW, c=ROW)
    errors = {"a": _errors(rowwise=GOOD), "b": _errors(rowwise=BAD)}
    demoted, promoted = _reviewer(sites, times).review(plan, errors)
    assert {path: x.choice for path, x in demoted.items()} == {"b": BF16}
    # 0.2 / (1.5 * 0.037)
    assert demoted["b"].reason == "the live error of its fwd is 3.60 times its limit"
    assert {path: x.choice.name for path, x in promoted.items()} == {"a": ROW}
    assert promoted["a"].reason == "its live errors are within the limits"
    after = plan.changed({**demoted, **promoted})
    assert _reviewer(sites, times).review(after, errors) == ({}, {})


@pytest.mark.parametrize(
    "now, errors, demoted, promoted",
    [
        # Another FP8 may be accurate enough where one is not.
        (TENSOR, {"tensorwise": BAD, "rowwise": GOOD}, ROW, None),
        (TENSOR, {"tensorwise": BAD, "rowwise": BAD}, BF16.name, None),
        # Nothing is known of what runs: no reason to leave it.
        (TENSOR, {"rowwise": BAD}, None, None),
        (TENSOR, {"rowwise": GOOD}, None, None),
        (ROW, {"rowwise": GOOD, "tensorwise": GOOD}, None, TENSOR),
        (BF16.name, {"rowwise": NEAR, "tensorwise": BAD}, None, ROW),
        (BF16.name, {"rowwise": BAD, "tensorwise": BAD}, None, None),
        (BF16.name, {}, None, None),
    ],
)
def test_the_fastest_within_the_limits_runs(now, errors, demoted, promoted):
    found = _reviewer([_site()]).review(
        _plan(**{PATH: now}), {PATH: _errors(**errors)} if errors else {}
    )
    names = [x[PATH].choice.name if x else None for x in found]
    assert names == [demoted, promoted]


def test_fp8_that_is_hardly_faster_than_fp8_is_not_worth_a_change():
    reviewer = _reviewer([_site()], TIMES | {TENSOR: 0.97})
    errors = {PATH: _errors(rowwise=GOOD, tensorwise=GOOD)}
    assert reviewer.review(_plan(**{PATH: ROW}), errors) == ({}, {})


@pytest.mark.parametrize(
    "now, errors, promoted",
    [
        (BF16.name, {"rowwise": NEAR}, None),
        (BF16.name, {"rowwise": GOOD}, ROW),
        (ROW, {"rowwise": NEAR, "tensorwise": NEAR}, None),
        (ROW, {"rowwise": NEAR, "tensorwise": GOOD}, TENSOR),
        (TENSOR, {"rowwise": GOOD, "tensorwise": NEAR}, None),  # nor what is slower
    ],
)
def test_a_site_that_was_demoted_asks_for_more(now, errors, promoted):
    plan, live = _plan(**{PATH: now}), {PATH: _errors(**errors)}
    found = _reviewer([_site()]).review(plan, live, demoted_before=[PATH])
    assert not found.demoted
    names = [decision.choice.name for decision in found.promoted.values()]
    assert names == ([] if promoted is None else [promoted])


def test_a_rule_has_the_last_word():
    reviewer = _reviewer([_site()], rules={PATH: "fp8_tensorwise"})
    plan = DispatchPlan(((PATH, Decision(Choice.parse(TENSOR), "rule")),))
    assert reviewer.review(plan, {PATH: _errors(tensorwise=BAD)}) == ({}, {})


def test_a_site_without_fp8_in_its_model_gets_none():
    plan = resolve(SiteSpec(128, 64, 64), BF16, stand_ins.CPU)
    reviewer = _reviewer([Site(path=PATH, plan=plan)])
    errors = {PATH: _errors(rowwise=GOOD, tensorwise=GOOD)}
    assert reviewer.review(_plan(**{PATH: BF16.name}), errors) == ({}, {})


def test_a_share_is_that_of_the_worst_measure_at_its_upper_end():
    fwd = dict.fromkeys(MEASURES, Interval(0.02, 0.01, 0.037))
    drhs = fwd | {"worst_row": Interval(0.4, 0.3, 0.592)}
    errors = {"fwd": {"fp8_rowwise": fwd}, "drhs": {"fp8_rowwise": drhs}}
    recipe = Choice.parse(ROW).recipe
    shares = shares_of_limits(recipe, errors, Limits())
    assert shares == pytest.approx({"fwd": 1 / 1.5, "drhs": 0.592 / 0.037 / 8})
    shares = shares_of_limits(recipe, errors, Limits(mere=0.01))
    assert shares == pytest.approx({"fwd": 3.7, "drhs": 3.7})
    assert shares_of_limits(Choice.parse(TENSOR).recipe, errors, Limits()) == {}


@pytest.mark.parametrize("error, may", [(GOOD, True), (NEAR, False)])
def test_a_site_returns_only_well_within_the_limits(error, may):
    reviewer, choice = _reviewer([_site()]), Choice.parse(ROW)
    assert reviewer.is_well_within(choice, _errors(rowwise=error)) is may
    assert reviewer.is_well_within(choice, {})  # nothing speaks against it
