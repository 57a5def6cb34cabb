"""What a survey makes of measurements: verdicts, losses, warnings, refusals."""

import jax
import numpy as np
import pytest

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision, Limits
from loka_jax.measure.intervals import Interval, interval
from loka_jax.probe.elements import Elements
from loka_jax.probe.site import ProbeConfig
from loka_jax.recipe import ROLES, get_recipe
from loka_jax.site import BF16, Choice
from loka_jax.survey import sensitivity, summary
from loka_jax.survey.sensitivity import Effect, Losses, compare, refusals, shared
from loka_jax.survey.survey import _judged, judge, prediction
from tests.support.dispatch import LIMIT, ROW, up_to


def _measures(relative_l2, worst_row=0.1, mere=0.4):
    values = {"relative_l2": relative_l2, "worst_row": worst_row, "mere": mere}
    return {name: up_to(value) for name, value in values.items()}


@pytest.mark.parametrize(
    "found, speedup, limits, expected, reason",
    [
        (LIMIT, 1.05, Limits(), (True, True), "1.05 times bfloat16, relative L2 0.028"),
        (LIMIT, 1.04, Limits(), (True, False), "1.04 times bfloat16"),
        (LIMIT, None, Limits(), (True, None), "relative L2 0.028"),
        (0.08, 2.0, Limits(), (False, True), "relative l2 0.08 is above 0.0555"),
    ],
)
def test_verdicts(found, speedup, limits, expected, reason):
    verdict = judge(_measures(found), speedup, limits)
    assert tuple(verdict.values()) == (*expected, reason)


def test_a_candidate_is_judged_by_drawn_operands_and_told_of_others():
    by_source = {"learned": _measures(0.02), "real": _measures(0.08)}
    times = {"fwd": {BF16.name: 3.0, ROW: 2.0}, "dlhs": {ROW: 1.0}}
    record = _judged("fwd", ROW, by_source, times, Limits())
    assert record["is_safe_by"] == {"learned": True, "real": False}
    assert (record["us"], record["speedup"], record["is_safe"]) == (2.0, 1.5, True)
    assert record["errors"]["real"]["mere"] == up_to(0.4)._asdict()
    record = _judged("dlhs", ROW, by_source, times, Limits())
    assert record["us"] == 1.0 and record["speedup"] is record["is_fast"] is None
    plain = _judged("fwd", BF16.name, by_source, times, Limits())
    assert plain["speedup"] == 1.0 and "is_safe" not in plain


def _record(learned, real, is_safe=True):
    means = {"learned": learned, "real": real, "normal": 0.05}
    errors = {name: {"relative_l2": {"mean": x}} for name, x in means.items()}
    is_safe_by = dict.fromkeys(means, True) | {"real": is_safe}
    return {"errors": errors, "is_safe_by": is_safe_by}


def test_predictions_are_compared_with_real_operands():
    wrong, other = _record(0.03, 0.06, False), _record(0.04, 0.1)
    roles = {"fwd": {BF16.name: {}, ROW: _record(0.02, 0.01)}}
    roles["drhs"] = {ROW: wrong, "other": other}
    found = prediction([{"path": "a", "roles": roles}])
    learned, normal = found["learned"], found["normal"]
    assert learned["count"] == 3
    assert learned["mean_deviation"] == pytest.approx((1 + 0.5 + 0.6) / 3)
    assert learned["rank_correlation"] == pytest.approx(1.0)
    assert normal["rank_correlation"] is None
    assert normal["mean_deviation"] == pytest.approx((4 + 1 / 6 + 0.5) / 3)
    assert [x["wrong_verdicts"] for x in found.values()] == [[f"a drhs {ROW}"]] * 2
    assert prediction([]) == {}


def test_statistics_are_summarized():
    shapes = jax.eval_shape(lambda: ProbeConfig().init(6, 4, 10))
    stats = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    scatter = np.diag([9.0, 1.0, 4.0, 0.0])[None] * 99
    values = {"count": 100.0, "mean": np.array([3.0, 0, 4.0, 0]), "scatter": scatter}
    moments = stats.lhs.moments._replace(**values)
    elements = Elements(np.array([10.0, *range(2, 11)]))
    stats = stats._replace(lhs=stats.lhs._replace(moments=moments, elements=elements))
    lhs = summary.summarize(stats)["lhs"]
    np.testing.assert_allclose(lhs.pop("spectrum"), [9.0, 4.0, 1.0, 0.0])
    expected = {"effective_rank": 14**2 / (81 + 16 + 1)}
    expected |= {"mean": 2, "amax": 6, "deviation": 0.3**0.5}
    expected |= {"underflow": 0.8, "saturation": 0.9}
    assert {name: lhs[name] for name in expected} == pytest.approx(expected)


DELAYED = Choice.parse("xla fp8_tensorwise_delayed")
BACKWARD = Choice.parse("xla bf16/fp8_rowwise/fp8_rowwise")


@pytest.mark.parametrize(
    "limit, count", [(0.061, 0), (0.031, 1), (0.029, 2), (0.009, 3)]
)
def test_sites_are_given_up_until_the_rise_is_within_the_limit(
    monkeypatch, limit, count
):
    # The mean of a is the largest, the upper end of b.
    alone = {"b": (0.001, 0.03), "c": (0.002, 0.02), "a": (0.005, 0.01)}
    asked, lines = [], []

    def effect_of(choices):
        asked.append(sorted(choices))
        mean, high = np.sum([alone[path] for path in choices], axis=0)
        return Effect(Interval(mean, 2 * mean - high, high), 0.0, 1.0, 64)

    def effect_meter(run, state, max_batches):
        assert max_batches == 7
        return effect_of

    monkeypatch.setattr(sensitivity, "effect_meter", effect_meter)
    choices = dict.fromkeys("abc", DELAYED) | {"d": BACKWARD}
    plan = DispatchPlan(tuple((p, Decision(c, "")) for p, c in choices.items()))
    options = {"limit": limit, "max_batches": 7, "say": lines.append}
    found = refusals(None, None, plan, **options)
    assert list(found) == list(alone)[:count]
    assert asked[0] == ["a", "b", "c"]  # what d does the loss does not show
    assert "FP8 at 3 sites changes the loss by 0.8000%" in lines[0]
    assert not found or found["b"].endswith("; here by 0.1000%")


def test_choices_without_a_state_take_current_scales():
    current = sensitivity._with_current_scales(DELAYED)
    expected = get_recipe("fp8_tensorwise")
    for role in ROLES:
        assert current.recipe.gemm(role) == expected.gemm(role)
    assert sensitivity._with_current_scales(Choice.parse(ROW)) == Choice.parse(ROW)


def of_one_task(values, weights):
    shares = np.asarray(weights, np.float64) / np.sum(weights)
    return Losses(np.asarray(values, np.float64)[:, None], shares[:, None])


def test_with_equal_weights_the_interval_is_that_of_the_differences():
    rng = np.random.default_rng(0)
    plain, changed = rng.normal(1, 0.3, 50), rng.normal(1.1, 0.3, 50)
    found = compare(*(of_one_task(x, np.ones(50)) for x in (plain, changed)))
    want = *interval(changed - plain), plain.mean(), np.abs(changed - plain).mean()
    got = *found.change, found.loss, found.moved
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_an_example_counts_by_its_weight():
    rng = np.random.default_rng(1)
    arms, weights = (
        (rng.normal(1, 0.3, 40), rng.normal(1.1, 0.3, 40)),
        rng.integers(1, 4, 40),
    )
    found = compare(*(of_one_task(x, weights) for x in arms))
    ones = np.ones(weights.sum())
    want = compare(*(of_one_task(np.repeat(x, weights), ones) for x in arms))
    for a, b in ((found.loss, want.loss), (found.moved, want.moved)):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    np.testing.assert_allclose(found.rise.mean, want.rise.mean, rtol=1e-12)
    # The same example several times is no more evidence.
    assert found.change.half > want.change.half


@pytest.mark.parametrize("task_weights", [(), (2.0, 0.5)])
def test_a_task_has_the_mean_of_the_examples_with_its_label(task_weights):
    values = np.array([[1.0, 9.0], [3.0, 2.0], [7.0, np.nan], [5.0, 4.0]])
    weights = np.array([[1.0, 0.0], [3.0, 3.0], [0.0, 0.0], [0.0, 1.0]])
    found = shared(values, weights, task_weights)
    assert len(found.values) == 3  # one has no weight
    first, second = task_weights or (1.0, 1.0)
    assert found.mean == pytest.approx(first * 2.5 + second * 2.5)
