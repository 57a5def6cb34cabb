"""What live errors are, and what they change in a plan."""

import math

import chex
import numpy as np
import pytest
from scipy.special import stdtrit

from loka_jax.dispatch import review
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.dispatch.review import Reviewer
from loka_jax.dispatch.table import MEASURES, Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.nn import Site
from loka_jax.ops.plan import resolve
from loka_jax.probe.live_errors import LiveErrors
from loka_jax.recipe import ROLES
from loka_jax.site import BF16, Choice, SiteSpec
from tests.support import stand_ins
from tests.support.dispatch import HEADER, LIMIT, ROW, model_of, site

TENSOR = "xla fp8_tensorwise"
TIMES = {BF16.name: 2.0, ROW: 1.0, TENSOR: 0.9}
PATH = "top/dense_0"
# Mean and upper end, over the limit. What runs leaves by its mean, another comes by its
# upper end, and comes back by three quarters of it.
GOOD, NEAR, DOUBTFUL, BAD = (0.5, 0.75), (0.6, 1.0), (0.99, 1.01), (1.01, 1.02)


def _site(path=PATH, n=64) -> Site:
    plan = resolve(SiteSpec(128, 64, n), Choice.parse(ROW), stand_ins.CPU)
    return Site(path=path, plan=plan)


def _reviewer(sites, times=TIMES, **options) -> Reviewer:
    return Reviewer(sites, model_of(sites, times), config="model", **options)


def _errors(role="dlhs", **shares):
    """Returns errors by the last word of a recipe's name, which one role has."""
    small = dict.fromkeys(MEASURES, Interval(0.1 * LIMIT, 0.0, 0.2 * LIMIT))
    found = {each: {f"fp8_{name}": small for name in shares} for each in ROLES}
    for name, (mean, high) in shares.items():
        error = Interval(mean * LIMIT, 0.0, high * LIMIT)
        found[role][f"fp8_{name}"] = small | {"relative_l2": error}
    return found


def _plan(**names) -> DispatchPlan:
    made = ((x, Choice.parse(y), 2.0 / TIMES[y]) for x, y in names.items())
    return DispatchPlan(tuple((x, Decision(y, "at first", z)) for x, y, z in made))


def _names(decisions):
    return {path: decision.choice.name for path, decision in decisions.items()}


def test_sites_are_promoted_and_demoted_by_their_own_errors():
    sites = [_site(name, n=64 * (i + 1)) for i, name in enumerate("abc")]
    times = {BF16.name: 2.0, ROW: 1.0}
    plan = _plan(a=BF16.name, b=ROW, c=ROW)
    errors = {"a": _errors(rowwise=GOOD), "b": _errors(rowwise=(3.6, 4.0))}
    demoted, promoted = _reviewer(sites, times).review(plan, errors)
    assert _names(demoted) == {"b": BF16.name} and _names(promoted) == {"a": ROW}
    assert demoted["b"].reason == "the live error of its dlhs is 3.60 times its limit"
    assert promoted["a"].reason == "its live errors are within the limits"
    after = plan.changed({**demoted, **promoted})
    assert _reviewer(sites, times).review(after, errors) == ({}, {})


@pytest.mark.parametrize("role", ["fwd", "drhs"])
@pytest.mark.parametrize(
    "now, was_demoted, errors, demoted, promoted",
    [
        (TENSOR, False, {"tensorwise": DOUBTFUL, "rowwise": GOOD}, None, None),
        # Another FP8 may be accurate enough where one is not.
        (TENSOR, False, {"tensorwise": BAD, "rowwise": GOOD}, ROW, None),
        (TENSOR, False, {"tensorwise": BAD, "rowwise": DOUBTFUL}, BF16.name, None),
        # Nothing is known of what runs: no reason to leave it.
        (TENSOR, False, {"rowwise": BAD}, None, None),
        (ROW, False, {"rowwise": GOOD, "tensorwise": GOOD}, None, TENSOR),
        (BF16.name, False, {"rowwise": NEAR, "tensorwise": BAD}, None, ROW),
        (BF16.name, False, {"rowwise": DOUBTFUL, "tensorwise": BAD}, None, None),
        # One that was demoted asks for more.
        (BF16.name, True, {"rowwise": (0.5, 0.76)}, None, None),
        (BF16.name, True, {"rowwise": GOOD}, None, ROW),
        (ROW, True, {"rowwise": NEAR, "tensorwise": NEAR}, None, None),
        (ROW, True, {"rowwise": NEAR, "tensorwise": GOOD}, None, TENSOR),
        (TENSOR, True, {"rowwise": GOOD, "tensorwise": NEAR}, None, None),
    ],
)
def test_the_fastest_within_the_limits_runs(
    now, was_demoted, errors, demoted, promoted, role
):
    live, before = {PATH: _errors(role, **errors)}, [PATH] * was_demoted
    found = _reviewer([_site()]).review(_plan(**{PATH: now}), live, before)
    names = [x[PATH].choice.name if x else None for x in found]
    assert names == [demoted, promoted]


def test_a_rule_has_the_last_word_and_a_site_returns_only_well_within_the_limits():
    reviewer = _reviewer([_site()], rules={PATH: "fp8_tensorwise"})
    plan = DispatchPlan(((PATH, Decision(Choice.parse(TENSOR), "rule")),))
    assert reviewer.review(plan, {PATH: _errors(tensorwise=BAD)}) == ({}, {})
    errors = _errors(rowwise=GOOD), _errors(rowwise=(0.5, 0.76)), {}
    found = [reviewer.is_well_within(Choice.parse(ROW), own) for own in errors]
    assert found == [True, False, True]  # nothing speaks against the last


RECIPES = ("fp8_tensorwise", "fp8_rowwise")
SIZES = np.array([[1.0, 3.0, 7.0], [2.0, 5.0, 11.0], [1.5, 4.0, 9.0]])  # role, measure


def _steps(values, decay=1.0):
    """Returns the errors of steps: these of the second recipe's fwd in relative L2."""
    values, weights = np.asarray(values), decay ** np.arange(len(values))[::-1]
    sums = np.zeros((2, 3, 3, 4))
    sums[1, ..., 0], sums[1, ..., 1] = weights.sum(), (weights**2).sum()
    sums[1, ..., 2] = np.sum(weights * values) * SIZES
    sums[1, ..., 3] = np.sum(weights * values**2) * SIZES**2
    steps, amaxes = np.float32(len(values)), np.zeros(3, np.float32)
    return LiveErrors(steps, sums, amaxes, np.zeros((1, 1)))


def _errors_live(value, recipe="fp8_rowwise", low=0.9, high=1.2):
    """Returns errors, each of another size; `low` and `high` are those of intervals."""
    ends = np.array([1.0, low, high])
    return {
        role: {
            recipe: {
                m: Interval(*(x * value * ends))
                for m, x in zip(MEASURES, sizes, strict=True)
            }
        }
        for role, sizes in zip(ROLES, SIZES, strict=True)
    }


@pytest.mark.parametrize("decay", [1.0, 0.75])
def test_the_interval_is_that_of_another_step(decay):
    values = np.array([0.03, 0.05, 0.04, 0.06] * 10)
    weights = decay ** np.arange(40.0)[::-1]
    mean = np.average(values, weights=weights)
    count = weights.sum() ** 2 / np.sum(weights**2)  # 40, or 7 effectively
    freedom = weights.sum() - np.sum(weights**2) / weights.sum()
    deviation = math.sqrt(np.sum(weights * (values - mean) ** 2) / freedom)
    half = stdtrit(count - 1, 0.975) * deviation * math.sqrt(1 + 1 / count)
    found = review.live_intervals(_steps(values, decay), RECIPES)
    expected = _errors_live(mean, low=1 - half / mean, high=1 + half / mean)
    chex.assert_trees_all_close(found, expected, rtol=1e-6)


@pytest.mark.parametrize("count", range(4))
def test_too_few_steps_say_nothing(count):
    steps = _steps([0.03] * count)
    found = review.live_intervals(steps, RECIPES)
    assert any(found.values()) == (count == 3)


def test_of_a_stack_of_layers_the_errors_are_those_of_the_largest_mean():
    layers = [_steps([x] * 5) for x in (0.02, 0.07, 0.05)]
    stack = LiveErrors(*map(np.stack, zip(*layers, strict=True)))
    found = review.live_intervals(stack, RECIPES)
    assert found == review.live_intervals(layers[1], RECIPES)


def test_drawn_errors_are_corrected_by_what_was_seen_of_others():
    factors = {"a": 2.0, "b": 2.2, "c": 1.8}
    drawn = {path: _errors_live(0.03) for path in factors}
    for errors in drawn.values():
        for role in ROLES:
            errors[role] |= _errors_live(0.04, "fp8_blockwise", high=1.1)[role]
    seen = {path: _errors_live(0.03 * factor) for path, factor in factors.items()}
    by_role = review.ratios(seen, drawn)
    logs = np.log(list(factors.values()))
    for role in ROLES:
        for ratio in by_role[role].values():
            spread = stdtrit(2, 0.975) * logs.std(ddof=1) * math.sqrt(1 + 1 / 3)
            expected = logs.mean() + np.array([0, -spread, spread])
            np.testing.assert_allclose(ratio, expected, rtol=1e-6)

    own = review.own_errors(seen["a"], drawn["a"], by_role)
    assert own["drhs"]["fp8_rowwise"] == seen["a"]["drhs"]["fp8_rowwise"]
    half = math.hypot(spread, math.log(1.1))  # of the ratio, and of the draws
    expected = 0.04 * np.exp(logs.mean() + np.array([0, -half, half]))
    found = own["drhs"]["fp8_blockwise"]["worst_row"]
    np.testing.assert_allclose(found, 4.0 * expected, rtol=1e-6)


def test_a_table_takes_the_errors_of_the_model():
    sites = [site("a"), site("b"), site("c", n=128), site("d", n=256)]
    keys = [table_key(x.spec) for x in sites]
    entry = Entry(dict(training={"xla bf16": 2.0}), {"model b": _errors_live(0.5)})
    table = Table(HEADER, dict.fromkeys(keys[:3], entry))
    seen = {"a": _errors_live(0.03), "c": _errors_live(0.04), "d": _errors_live(0.05)}
    found = review.with_live(table, sites, seen, "model")
    own = {x: Entry(errors={f"model {x}": seen[x]}) for x in "ac"}
    assert found.sites == {keys[0]: own["a"], keys[2]: own["c"]}
