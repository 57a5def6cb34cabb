"""The choice for a site: the edges of the policy."""

import pytest

from loka_jax.dispatch import policy
from loka_jax.dispatch.policy import Decision, Limits, Terms, decide
from loka_jax.dispatch.table import MEASURES, Entry
from loka_jax.measure.intervals import Interval
from loka_jax.site import BF16, Choice
from tests.support.dispatch import LIMIT, ROW, errors, up_to

TENSOR, KERNEL = "pallas fp8_tensorwise_delayed", "pallas bf16"
BELOW, ABOVE = 0.999 * LIMIT, 1.001 * LIMIT


def _entry(times, source="here", **highs) -> Entry:
    """Returns times in training, and errors by the last words of recipes' names."""
    return Entry({"training": times}, {source: errors(**highs)})


def _chosen(entry, limits=policy.DEFAULT_LIMITS, **terms) -> str:
    return decide(entry, limits, Terms(**terms)).choice.name


def test_the_fastest_that_is_accurate_enough_runs():
    times = {BF16.name: 10.0, ROW: 8.0, TENSOR: 5.0}
    entry = _entry(times, rowwise=BELOW, tensorwise_delayed=0.5 * BELOW)
    reason, error = "the fastest that is accurate enough", 0.25 * BELOW
    expected = Decision(Choice.parse(TENSOR), reason, 2.0, error, f"{ROW}: slower")
    assert decide(entry, Limits()) == expected
    entry = _entry(times, rowwise=BELOW, tensorwise_delayed=ABOVE)
    why = f"{TENSOR}: fwd: relative l2 0.0556 is above 0.0555"
    expected = Decision(Choice.parse(ROW), reason, 1.25, 0.5 * BELOW, why)
    assert decide(entry, Limits()) == expected


@pytest.mark.parametrize(
    "limits, highs, broken",
    [
        (Limits(), (LIMIT, 8 * 0.037, 9.0), None),  # at the limits
        (Limits(), (ABOVE, 0.1, 0.1), "relative l2 0.0556 is above 0.0555"),
        (Limits(), (0.01, 0.297, 0.1), "worst row 0.297 is above 0.296"),
        (Limits(healthy=1.0), (0.0371, 0.1, 0.1), "relative l2 0.0371 is above 0.037"),
        (Limits(), (float("nan"), 0.1, 0.1), "relative l2 nan is above 0.0555"),
    ],
)
def test_the_upper_ends_of_errors_are_within_the_limits(limits, highs, broken):
    measures = {name: up_to(x) for name, x in zip(MEASURES, highs, strict=True)}
    assert policy.why_unsafe(measures, limits) == broken


def test_a_share_is_that_of_the_worst_measure_at_its_upper_end():
    fwd = dict.fromkeys(MEASURES, Interval(0.02, 0.01, 0.037))
    drhs = fwd | {"worst_row": Interval(0.4, 0.3, 0.592)}
    found = {"fwd": {"fp8_rowwise": fwd}, "drhs": {"fp8_rowwise": drhs}}

    def shares(name, **end):
        return policy.shares_of_limits(
            Choice.parse(name).recipe, found, Limits(), **end
        )

    highs = {"fwd": 1 / 1.5, "drhs": 0.592 / 0.037 / 8}
    assert shares(ROW) == pytest.approx(highs)
    means = {"fwd": 0.02 / LIMIT, "drhs": 0.4 / 0.037 / 8}
    assert shares(ROW, end="mean") == pytest.approx(means)
    assert shares(TENSOR) == {}
    assert shares("xla fp8_rowwise/bf16/bf16").keys() == {"fwd"}


@pytest.mark.parametrize("role", ["fwd", "dlhs", "drhs"])
def test_each_product_must_be_accurate(role):
    entry = _entry({BF16.name: 10.0, ROW: 5.0}, rowwise=BELOW)
    entry.errors["here"][role] = errors(rowwise=ABOVE)[role]
    assert _chosen(entry) == BF16.name
    del entry.errors["here"][role]["fp8_rowwise"]
    found = decide(entry, Limits())
    assert found.runner_up == f"{ROW}: {role}: its error was not measured"


@pytest.mark.parametrize(
    "times, name",
    [
        ({BF16.name: 10.5, ROW: 10.0}, ROW),  # 1.05 times as fast
        ({BF16.name: 10.49, ROW: 10.0}, BF16.name),
        # FP8 must beat the best bfloat16.
        ({BF16.name: 10.0, KERNEL: 6.0, ROW: 5.9}, KERNEL),
        ({BF16.name: 10.0, KERNEL: 6.0, ROW: 5.7}, ROW),
        # Kernels must be worth leaving XLA for, whose fusions a site does not show.
        ({BF16.name: 10.8, KERNEL: 10.0}, KERNEL),
        ({BF16.name: 10.79, KERNEL: 10.0}, BF16.name),
        ({BF16.name: 10.79, TENSOR: 10.0}, BF16.name),
        ({BF16.name: 10.0, TENSOR: 5.0, ROW: 5.0}, TENSOR),  # the first of two
        ({ROW: 1.0}, BF16.name),
    ],
)
def test_a_choice_gains_enough(times, name):
    entry = _entry(times, rowwise=BELOW, tensorwise_delayed=BELOW)
    assert _chosen(entry) == name


def test_errors_are_those_of_the_source_or_the_worst_of_all():
    entry = _entry({BF16.name: 10.0, ROW: 5.0}, rowwise=ABOVE)
    entry.errors["there"] = errors(rowwise=0.2 * BELOW)
    assert _chosen(entry, source="there") == ROW
    assert _chosen(entry, source="here") == _chosen(entry) == BF16.name
    entry.errors["here"] = errors(rowwise=BELOW)
    assert decide(entry, Limits()).error == 0.5 * BELOW  # the larger one
    # Errors of others are borrowed: they make no FP8 safe, however small.
    why = decide(entry, Limits(), Terms(source="nowhere")).runner_up
    assert "borrowed from here and 1 more" in why
    assert _chosen(entry, source="nowhere", errors=errors(rowwise=BELOW)) == ROW
    assert _chosen(entry, source="there", errors=errors(rowwise=ABOVE)) == BF16.name


def test_inference_looks_at_the_forward_product_and_its_times_alone():
    entry = _entry({BF16.name: 3.0, ROW: 1.0}, rowwise=BELOW)
    entry.times["inference"] = {BF16.name: 3.0, ROW: 2.0}
    entry.errors["here"]["drhs"] = errors(rowwise=ABOVE)["drhs"]
    assert _chosen(entry) == BF16.name
    for source in ("here", "nowhere"):  # borrowed errors are enough there
        found = decide(entry, Limits(), Terms(roles=("fwd",), source=source))
        assert (found.choice.name, found.speedup) == (ROW, 1.5)
        assert found.error == 0.5 * BELOW


def test_what_may_not_run_is_passed_over():
    entry = _entry({BF16.name: 10.0, KERNEL: 5.0, ROW: 1.0}, rowwise=BELOW)
    found = decide(entry, Limits(), Terms(why_not_fp8="no"))
    assert found.choice.name == KERNEL and found.runner_up == f"{ROW}: no"
    terms = Terms(why_not=lambda x: None if x == BF16 else "too large")
    found = decide(entry, Limits(), terms)
    assert found.choice == BF16 and found.runner_up == f"{ROW}: too large"
    assert policy.accurate(entry, Limits(), terms) == [BF16]
