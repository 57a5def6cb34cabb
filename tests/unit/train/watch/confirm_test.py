"""FP8 of a plan against bfloat16 on validation examples."""

import dataclasses
import functools

import numpy as np
import pytest

from loka_jax.data import Position
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.site import BF16, Choice
from loka_jax.train import build as build_lib
from loka_jax.train.config import DispatchOptions
from loka_jax.train.evaluation import Evaluated
from loka_jax.train.watch import confirm
from loka_jax.train.watch.host_state import Progress
from tests.support import train as support
from tests.support import without_data

SITES = BOTTOM, TOP = ("bottom_mlp/dense_1", "top_mlp/dense_0")
ROW = Choice.parse(support.ROW)
Scored = functools.partial(Evaluated, values={}, counts=())
PROGRESS = Progress(step=80, position=Position(0, 80, 0))


@pytest.fixture(scope="module")
def run():
    """A run with two sites in FP8."""
    with pytest.MonkeyPatch.context() as patch:
        without_data.patch_build(patch)
        built = build_lib.build(support.config())
    decisions = tuple((path, Decision(ROW, "fast")) for path in SITES)
    return built.replanned(DispatchPlan(decisions))


def scored(rise=0.0, noise=0.0, count=4000):
    """Returns examples in FP8 whose loss is that much higher, and in bfloat16."""
    draws = np.random.default_rng(0)
    logits = draws.normal(size=count)
    labels = (draws.random(count) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    weights = np.ones(count, np.float32)
    plain = Scored(logits, labels, weights)
    # Logits that move the loss of each example by the same, and by noise.
    change = rise * plain.losses.mean() + noise * draws.normal(size=count)
    slope = 1 / (1 + np.exp(-logits)) - labels
    return Scored(logits + change / slope, labels, weights), plain


def test_losses_are_those_of_all_tasks_that_have_a_label():
    logits = np.array([[0.0, 3.0], [2.0, -1.0], [np.inf, 0.0]])
    labels = np.array([[1.0, np.nan], [0.0, 1.0], [1.0, 1.0]])
    losses = Scored(logits, labels, np.array([2.0, 1.0, 0.0])).losses
    second = np.log1p(np.exp(2.0)) + np.log1p(np.exp(1.0))
    np.testing.assert_allclose(losses, [2 * np.log(2), second])


@pytest.mark.parametrize(
    "rise, count, leaves",
    [
        (0.0, 4000, False),
        (1e-4, 4000, False),  # below 0.02 %
        (4e-4, 4000, True),
        (4e-4, 40, False),  # which may be chance
        (np.nan, 4000, True),
    ],
)
def test_sites_leave_fp8_if_the_loss_is_surely_above_the_limit(
    run, rise, count, leaves
):
    assert confirm.is_due(run, PROGRESS)
    said, change = confirm.confirmed(run, PROGRESS, *scored(rise, 2e-3, count))
    assert change.progress.confirmed == 0 and "(0.02% is allowed)" in said
    assert not confirm.is_due(run, change.progress)
    choices = dict(change.plan.choices)
    assert [choices[path] for path in SITES] == [BF16 if leaves else ROW] * 2
    assert change.progress.broken == (SITES if leaves else ())
    assert change.said == ((said,) if leaves else ())
    if leaves:
        assert said.endswith("2 sites run in bfloat16 now.")


def test_the_rise_is_that_of_the_mean_loss():
    rise = confirm.rise_of(*scored(3e-4, 1e-4))
    assert rise.mean == pytest.approx(3e-4, rel=0.05)
    assert 0 < rise.half < 2e-5


def test_what_a_rule_decides_and_plans_without_fp8_are_not_confirmed(run):
    later = dataclasses.replace(PROGRESS, confirmed=0, replanned=40)
    assert confirm.is_due(run, later)  # the plan has changed since
    ruled = DispatchOptions(rules=(f"*={ROW.name}",))
    config = dataclasses.replace(run.config, dispatch=ruled)
    assert not confirm.is_due(dataclasses.replace(run, config=config), PROGRESS)
    plain = confirm.in_bfloat16(run)
    assert {choice for _, choice in plain.plan.choices} == {BF16}
    assert not confirm.is_due(plain, PROGRESS)
