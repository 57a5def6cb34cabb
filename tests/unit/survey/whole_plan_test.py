"""A whole plan against bfloat16 on held-out examples: the limit on the loss bites."""

import dataclasses

import jax
import numpy as np
import pytest

from loka_jax.data import Position
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.scaling import DelayedScaling
from loka_jax.site import Choice
from loka_jax.survey.sensitivity import can_be_fp8
from loka_jax.survey.whole_plan import effect_of, refusals
from loka_jax.train.step import named_sites
from tests.support import train as support

DELAYED = Choice.parse("xla fp8_tensorwise_delayed")
BATCHES = 4


DATA = dataclasses.replace(support.DATA, eval_examples=32 * BATCHES)


@pytest.fixture(scope="module")
def trained():
    run = support.build_lib.build(support.config(data=DATA))
    state = run.init()
    for i in range(20):
        batch = run.splits.train.batch(Position(0, i % 10, 0), 32, shuffle=True)
        state = run.first_step(state, batch)
    return run, state


def _plan(run):
    paths = [site.path for site in run.sites if can_be_fp8(site)]
    return DispatchPlan(tuple((path, Decision(DELAYED, "a test")) for path in paths))


def _with_scales(state, path, scale_inv):
    """Returns the state with the scales of a site replaced, all others as they are."""
    bad = named_sites(state)[path]

    def replaced(site):
        if site is not bad:
            return site
        return DelayedScaling(site.table.at[:, 0].set(scale_inv))

    is_site = lambda x: isinstance(x, DelayedScaling)  # noqa: E731
    fp8 = jax.tree.map(replaced, state.fp8, is_leaf=is_site)
    return dataclasses.replace(state, fp8=fp8)


@pytest.mark.slow
def test_a_plan_within_the_limit_is_accepted(trained):
    run, state = trained
    lines = []
    options = dict(limit=0.5, max_batches=BATCHES, say=lines.append)
    assert refusals(run, state, _plan(run), **options) == {}
    assert len(lines) == 1 and f"{32 * BATCHES:,} examples" in lines[0]


@pytest.mark.slow
def test_a_site_with_bad_scales_is_given_up_and_no_other(trained):
    run, state = trained
    path = _plan(run).decisions[-1][0]
    # Everything flushes to zero.
    bad = _with_scales(state, path, 2.0**20)
    limit = 0.1
    choices = dict(_plan(run).choices)
    assert effect_of(run, state, choices, max_batches=BATCHES).rise.high < limit
    moved = effect_of(run, bad, choices, max_batches=BATCHES).rise
    assert moved.mean > limit
    refused = refusals(run, bad, _plan(run), limit=limit, max_batches=BATCHES)
    assert list(refused) == [path]


@pytest.mark.slow
def test_a_plan_that_the_data_cannot_judge_is_given_up_and_that_is_said(trained):
    run, state = trained
    choices = dict(_plan(run).choices)
    rise, examples = effect_of(run, state, choices, max_batches=BATCHES)
    limit = (rise.mean + rise.high) / 2
    assert limit > 0, "another seed"
    refused = refusals(run, state, _plan(run), limit=limit, max_batches=BATCHES)
    first = next(iter(refused.values()))
    # Half of the half width is left: four times as many examples.
    assert "the data cannot tell" in first
    needed = int(first.split("cannot tell, ")[1].split(" held-out")[0].replace(",", ""))
    np.testing.assert_allclose(needed, 4 * examples, rtol=0.01)
    assert all("examples" in reason for reason in refused.values())


@pytest.mark.slow
def test_choices_without_a_state_take_current_scales(trained):
    run, _ = trained
    config = support.config(data=DATA)
    config = dataclasses.replace(config, model=config.model.clone(recipe="bf16"))
    plain = support.build_lib.build(config)
    assert not named_sites(plain.init())
    choices = dict(_plan(run).choices)
    effect = effect_of(plain, plain.init(), choices, max_batches=1)
    assert np.isfinite(effect.rise.high) and effect.rise.mean != 0
