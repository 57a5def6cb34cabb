"""The choice for a site: the edges of the policy."""

import pytest

from loka_jax.dispatch.policy import Limits, Terms, decide
from loka_jax.dispatch.table import MEASURES, Entry
from loka_jax.measure.intervals import Interval
from loka_jax.recipe import ROLES
from loka_jax.site import BF16, Choice

GOOD, BAD = 0.037, 0.2
ROW, TENSOR = "xla fp8_rowwise", "pallas fp8_tensorwise_delayed"


def _errors(**of_recipes):
    """Returns errors of all roles: relative L2 by recipe."""
    return {
        role: {
            name: {m: Interval(value, value, value) for m in MEASURES}
            for name, value in of_recipes.items()
        }
        for role in ROLES
    }


def _entry(times, **of_recipes) -> Entry:
    return Entry({"training": times}, {"here": _errors(**of_recipes)})


def test_the_fastest_that_is_accurate_enough_runs():
    entry = _entry(
        {"xla bf16": 10.0, ROW: 8.0, TENSOR: 5.0},
        fp8_rowwise=GOOD,
        fp8_tensorwise_delayed=GOOD,
    )
    decision = decide(entry, Limits())
    assert decision.choice.name == TENSOR
    assert decision.speedup == 2.0 and decision.error == GOOD
    assert decision.runner_up == f"{ROW}: slower"


def test_what_is_wrong_loses_and_it_is_said_why():
    entry = _entry(
        {"xla bf16": 10.0, ROW: 8.0, TENSOR: 5.0},
        fp8_rowwise=GOOD,
        fp8_tensorwise_delayed=BAD,
    )
    decision = decide(entry, Limits())
    assert decision.choice.name == ROW
    assert decision.runner_up is not None and "relative l2 0.2" in decision.runner_up


def test_nothing_qualifies():
    entry = _entry({"xla bf16": 10.0, ROW: 8.0}, fp8_rowwise=BAD)
    decision = decide(entry, Limits())
    assert decision.choice == BF16 and "nothing else" in decision.reason


def test_everything_qualifies_under_loose_limits():
    entry = _entry({"xla bf16": 10.0, ROW: 8.0}, fp8_rowwise=BAD)
    assert decide(entry, Limits(healthy=10.0)).choice.name == ROW


def test_the_papers_limit_rejects_all():
    entry = _entry({"xla bf16": 10.0, ROW: 1.0}, fp8_rowwise=0.21)
    assert decide(entry, Limits(mere=0.2, healthy=99.0)).choice == BF16


@pytest.mark.parametrize("time, name", [(9.5, ROW), (9.6, "xla bf16")])
def test_little_gain_is_no_gain(time, name):
    entry = _entry({"xla bf16": 10.0, ROW: time}, fp8_rowwise=GOOD)
    assert decide(entry, Limits()).choice.name == name


def test_fp8_must_beat_the_best_bfloat16():
    entry = _entry({"xla bf16": 10.0, "pallas bf16": 6.0, ROW: 5.9}, fp8_rowwise=GOOD)
    decision = decide(entry, Limits())
    assert decision.choice.name == "pallas bf16" and decision.error is None
    assert decision.runner_up is not None and decision.runner_up.startswith(ROW)


def test_ties_go_to_the_first():
    entry = _entry(
        {"xla bf16": 10.0, ROW: 5.0, TENSOR: 5.0},
        fp8_rowwise=GOOD,
        fp8_tensorwise_delayed=GOOD,
    )
    assert decide(entry, Limits()).choice.name == ROW


@pytest.mark.parametrize("entry", [Entry(), _entry({ROW: 1.0})])
def test_what_was_not_measured_runs_in_bfloat16(entry):
    decision = decide(entry, Limits())
    assert decision.choice == BF16 and "times are unknown" in decision.reason


def test_an_error_that_was_not_measured_is_no_small_one():
    entry = _entry({"xla bf16": 10.0, ROW: 1.0})
    assert decide(entry, Limits()).choice == BF16


def test_errors_are_those_of_the_source_or_the_worst_of_all():
    entry = _entry({"xla bf16": 10.0, ROW: 5.0}, fp8_rowwise=BAD)
    entry.errors["there"] = _errors(fp8_rowwise=GOOD)
    assert decide(entry, Limits(), Terms(source="there")).choice.name == ROW
    assert decide(entry, Limits(), Terms(source="here")).choice == BF16
    assert decide(entry, Limits(), Terms(source="nowhere")).choice == BF16


def test_inference_looks_at_the_forward_product_alone():
    entry = _entry({"xla bf16": 10.0}, fp8_rowwise=GOOD)
    entry.times["inference"] = {"xla bf16": 3.0, ROW: 1.0}
    entry.errors["here"]["drhs"]["fp8_rowwise"] = _errors(x=BAD)["drhs"]["x"]
    assert decide(entry, Limits(), Terms(roles=("fwd",))).choice.name == ROW
    assert decide(entry, Limits()).choice == BF16


def test_products_are_found_by_their_casts():
    mixed = "xla fp8_rowwise/bf16/bf16"
    entry = _entry({"xla bf16": 10.0, mixed: 5.0}, fp8_rowwise=GOOD)
    assert decide(entry, Limits()).choice == Choice.parse(mixed)


def test_a_model_in_bfloat16_stays_in_it():
    entry = _entry({"xla bf16": 10.0, "pallas bf16": 5.0, ROW: 1.0}, fp8_rowwise=GOOD)
    assert decide(entry, Limits(), Terms(why_not_fp8="no")).choice.name == "pallas bf16"


def test_kernels_must_be_worth_leaving_xla_for():
    # XLA may fuse with a site's neighbours, which a site alone does not show.
    kernel, fp8 = "pallas bf16", "pallas fp8_rowwise"
    entry = _entry({BF16.name: 10.6, kernel: 10.0, fp8: 9.9}, fp8_rowwise=GOOD)
    decision = decide(entry, Limits())
    assert decision.choice == BF16
    assert (
        decision.runner_up is not None
        and "too little to leave XLA" in decision.runner_up
    )
    assert decide(entry, Limits(leave_xla=1.05)).choice.name == kernel
