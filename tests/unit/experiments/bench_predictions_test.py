"""Predictions judged: what plans run after they measured, and the figures on that."""

import dataclasses
import functools

import pytest

from experiments.bench import measured_choices, predictions
from experiments.bench.measured_choices import TableGpu
from loka_jax.dispatch.local import fitted_table
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.policy import DEFAULT_LIMITS
from loka_jax.dispatch.table import Entry, Table
from loka_jax.site import BF16, SiteSpec

# XLA's bfloat16 is predicted to be the fastest here, and a kernel is, by a fifth.
SPEC = SiteSpec(32768, 128, 128, "none", "relu")
KERNEL = "pallas bf16"


@functools.cache
def _table():
    """Returns every second site that predictions are fitted to, and one more."""
    fitted = fitted_table("NVIDIA H200")
    some = dict(list(fitted.sites.items())[::2])
    return dataclasses.replace(fitted, sites={**some, SPEC: fitted.sites[SPEC]})


@functools.cache
def _model():
    sites = {s: e for s, e in _table().sites.items() if s != SPEC}
    return PerformanceModel(dataclasses.replace(_table(), sites=sites))


def _judged_alone():
    return predictions.judged(
        list(predictions._predicted((_model(), SPEC), _table(), "training")), 1
    )


@pytest.mark.parametrize("chosen_by", [measured_choices.auto, measured_choices.tune])
def test_a_plan_that_measures_mends_a_wrong_prediction(chosen_by):
    assert _judged_alone()["worst"][0]["chosen"] == BF16.name
    cases = [(_model(), SPEC)]
    found = predictions.checked(chosen_by, cases, _table(), "training", 1)
    assert found["worst"][0]["chosen"] == KERNEL and found["largest_regret"] == 0
    every = len(_table().sites[SPEC].times["training"])
    assert 2 <= found["most_measured"] < every


def test_a_plan_keeps_xla_where_limits_ask_for_more():
    gpu = TableGpu(_table(), SPEC, "training")
    limits = dataclasses.replace(DEFAULT_LIMITS, leave_xla=2.0, speedup=2.0)
    assert measured_choices.auto(_model(), gpu, limits).choice == BF16.name


def test_only_candidates_of_the_table_take_part():
    gpu = TableGpu(_table(), SPEC, "training")
    model = _model().with_table(gpu.unknown())
    times = model.estimates(SPEC).entry.times["training"]
    assert set(times) <= set(_table().sites[SPEC].times["training"])


def test_regrets_are_relative_to_the_fastest_and_the_largest_come_first():
    slow, right = SiteSpec(64, 64, 64), SiteSpec(128, 64, 64)
    regrets = [
        predictions._regret(right, "a", {"a": 30.0, "b": 40.0}),
        predictions._regret(slow, "b", {"a": 10.0, "b": 12.0}),
    ]
    found = predictions.summary(regrets, worst=1)
    assert found["mean_regret"] == pytest.approx(0.1)
    assert found["largest_regret"] == pytest.approx(0.2)
    assert found["above_a_tenth"] == 1
    assert found["total_regret"] == pytest.approx(42 / 40 - 1)
    (row,) = found["worst"]
    assert (row["site"], row["chosen_us"], row["best_us"]) == (str(slow), 12.0, 10.0)


def test_measurements_of_one_program_are_compared_in_inference():
    spec = SiteSpec(4096, 256, 256)
    times = {
        "xla fp8_rowwise": 10.0,
        "xla fp8_rowwise/bf16/bf16": 11.0,  # the same program
        "xla fp8_tensorwise": 15.0,
        BF16.name: 5.0,
    }
    table = Table(_table().header, {spec: Entry({"inference": times})})
    found = predictions.repeated(table)
    assert found["programs"] == 1 and found["largest"] == pytest.approx(0.1)
