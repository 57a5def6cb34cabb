"""A survey and a whole plan of a small trained model."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from loka_jax.data import Position
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.recipe import ROLES
from loka_jax.scaling import stored
from loka_jax.site import BF16, Choice
from loka_jax.survey import SurveyConfig, survey
from loka_jax.survey.sensitivity import can_be_fp8, refusals
from loka_jax.train.config import ProbeOptions
from loka_jax.train.observe import probe_step
from loka_jax.train.step import named_sites
from tests.support import train as support

BATCHES = 4
DATA = dataclasses.replace(support.DATA, eval_examples=32 * BATCHES)
DELAYED = Choice.parse("xla fp8_tensorwise_delayed")
OPTIONS = SurveyConfig(
    pairs=6,
    rows=32,
    captured_batches=2,
    held_out_batches=2,
    recipes=("fp8_tensorwise_delayed",),
)


@pytest.fixture(scope="module")
def trained():
    config = support.config(data=DATA)
    config = dataclasses.replace(config, probe=ProbeOptions(every=1))
    run = support.build_lib.build(config)
    state = run.init()
    for i in range(20):
        batch = run.splits.train.batch(Position(0, i % 10, 0), 32, shuffle=True)
        if i < 3:
            seen = probe_step(run, run.config.probe.config_at(i))(state, batch)
            state = dataclasses.replace(state, probe=seen)
        state = run.train_step()(state, batch)
    return run, state


def test_every_role_of_every_site_that_fp8_takes_is_measured(trained):
    (run, state), lines = trained, []
    found = survey(run, state, OPTIONS, lines.append)
    paths = [site["path"] for site in found["sites"]]
    others = [site["path"] for site in found["not_surveyed"]]
    assert set(paths) | set(others) == {site.path for site in run.sites}
    assert "head" in others and all(one["why"] for one in found["not_surveyed"])
    assert len(lines) == len(paths) + 1
    for site in found["sites"]:
        assert set(site["roles"]) == set(ROLES)
        for role, measured in site["roles"].items():
            assert len(measured) == 2, role
            for name, one in measured.items():
                error = one["errors"]["learned"]["relative_l2"]
                assert error["low"] <= error["mean"] <= error["high"]
                assert (error["mean"] < 0.005) == (name == BF16.name)
                assert error["mean"] < 0.15


def test_a_site_with_bad_scales_is_given_up_and_no_other(trained):
    run, state = trained
    paths = [site.path for site in run.sites if can_be_fp8(site)]
    plan = DispatchPlan(tuple((path, Decision(DELAYED, "a test")) for path in paths))
    last = named_sites(state)[paths[-1]].table
    flushing = stored(jnp.full(3, 2.0**20), DELAYED.recipe).table
    fp8 = jax.tree.map(lambda table: flushing if table is last else table, state.fp8)
    bad = dataclasses.replace(state, fp8=fp8)
    for each, refused in ((state, []), (bad, paths[-1:])):
        found = refusals(run, each, plan, limit=0.1, max_batches=BATCHES)
        assert list(found) == refused
