"""Predictions of a step: the planner's parts, Dispatch's times, memory, the host."""

import dataclasses
import types

import pytest

from experiments.plan import schema_of
from loka_jax.dispatch.group_times import group_us
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.table import Entry
from loka_jax.measure.roofline import Roofline
from loka_jax.search import predicted
from loka_jax.search.space import axes_of, points_of
from loka_jax.train.model import model_of
from loka_jax.train.plan_files import OFF
from loka_jax.train.planner.mesh_plan import Rates
from tests.support.configs import tiny

CONFIG = tiny("fp8_dlrm")


def test_more_steps_a_call_wait_less_for_the_host():
    points, _ = points_of(CONFIG, axes_of(CONFIG, ["steps-per-call=1,4"], 1))
    predict = predicted.Predictor.here(schema_of(CONFIG))
    one, four = map(predict, points)
    assert len(predict.workloads) == 1
    assert sum(one.us.values()) == pytest.approx(Rates().call_us)
    assert one.us["dense"] == four.us["dense"] > 0 and one.us["fetch"] > 0
    assert four.us.get("host", 0.0) < one.us["host"]
    assert one.predicted == pytest.approx(1e6 * 128 / Rates().call_us)
    (workload,) = predict.workloads.values()
    parameters = workload.gradient_bytes / 4
    assert one.us["update"] == pytest.approx(28 * parameters / 4e6, rel=1e-3)  # Adam
    assert 0 < one.memory_share == four.memory_share < 0.01


def test_a_mesh_exchanges_rows():
    config = dataclasses.replace(
        CONFIG, mesh=dataclasses.replace(CONFIG.mesh, replicas=2, shards=4)
    )
    ((point,), _) = points_of(config, [])
    case = predicted.Predictor.here(schema_of(config))(point)
    assert {"route", "replicas", "dense sum"} <= set(case.us)
    launched = Rates().launch_us + Rates().call_us / config.loop.steps_per_call
    assert case.step_us == pytest.approx(launched)


def known(times, roofline=None):
    """Returns times that are the same at every site."""
    estimates = types.SimpleNamespace(entry=Entry(times={"training": times}))
    return types.SimpleNamespace(estimates=lambda _: estimates, roofline=roofline)


def listed(config, schema):
    return model_of(config, schema).list_sites(DispatchPlan())


def test_sites_take_what_dispatch_knows_of_their_recipes():
    """Of a plan that is off: each site's own recipe, or XLA's bfloat16."""
    config, schema = dataclasses.replace(CONFIG, plan=OFF), schema_of(CONFIG)
    times = {"xla bf16": 10.0, "xla fp8_tensorwise_delayed_bf16_drhs": 3.0}
    workload = predicted._workload(config, schema, known(times))
    sites = listed(config, schema)
    own = sum("fp8" in site.recipe for site in sites)
    assert 0 < own < len(sites)
    expected = 1.3 * (3 * own + 10 * (len(sites) - own))
    assert workload.dense_us == pytest.approx(expected)


def test_sites_that_run_in_groups_take_the_time_of_these():
    model = CONFIG.model.clone(recipe="bf16", norm="block", implementation="group")
    config = dataclasses.replace(CONFIG, plan=OFF, model=model)
    schema = schema_of(config)
    roofline = Roofline(
        bytes_per_us=2e6,
        fp8_flops_per_us=1e9,
        bf16_flops_per_us=5e8,
        launch_us=1.0,
        sms=132,
    )
    workload = predicted._workload(config, schema, known({"xla bf16": 10.0}, roofline))
    sites = listed(config, schema)
    recipes = {site.path: site.plan.choice.recipe for site in sites}
    groups = {site.group for site in sites if site.in_group}
    assert groups
    us = sum(group_us(group, recipes, "training", roofline) for group in groups)
    us += 10 * sum(not site.in_group for site in sites)
    assert workload.dense_us == pytest.approx(1.3 * us)
