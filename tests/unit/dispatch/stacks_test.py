"""Wide layers in a row are decided as the one operation that they run as."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from loka_jax import nn, triton
from loka_jax.dispatch import stacks
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.first_use import as_if_accurate
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import make_plan
from loka_jax.dispatch.table import Entry, Table
from loka_jax.normed import NormName
from loka_jax.recipe import get_recipe
from loka_jax.site import SiteSpec
from tests.support.dispatch import H200

DELAYED = "xla fp8_tensorwise_delayed"
RESULT = pathlib.Path(__file__).parents[3] / "experiments/results/wide_stack_h200.json"
STACKS: dict[str, tuple[int, tuple[int, ...], NormName]] = {  # of the result
    "wukong_m": (2048, (2048, 2048, 2048, 4096), "block"),
    "wukong_l": (4608, (4096, 4096, 4096, 7680), "block"),
    "mlperf": (3456, (1024, 1024, 512, 256), "none"),
}


@pytest.fixture(autouse=True)
def triton_is_installed(monkeypatch):
    monkeypatch.setattr(triton, "why_not_installed", lambda: None)


def _sites(*, fused=True, features=(4096, 4096, 1024)):
    model = nn.Mlp(features, recipe="fp8_tensorwise_delayed", fused=fused)
    return nn.list_sites(model, jax.ShapeDtypeStruct((8192, 384), jnp.bfloat16))


def _plan(sites, times, *, errors=None):
    header = Header("cpu", "1", "1", "", "x")
    entries = {table_key(site.spec): Entry({"training": times}) for site in sites}
    model = PerformanceModel(Table(header, entries), roofline=H200)
    return make_plan(sites, model, errors=as_if_accurate(sites) | (errors or {}))


def test_fp8_of_a_stack_is_taken_though_its_casts_cost_sites_alone_more():
    alone = {"xla bf16": 1000.0, DELAYED: 1100.0}
    plan = _plan(_sites(), alone)
    assert {choice.name for _, choice in plan.choices} == {DELAYED}
    decision = plan.decisions[1][1]
    assert decision.spread == stacks.SPREAD
    assert "as one operation" in decision.reason
    apart = _plan(_sites(fused=False), alone)
    assert {choice.name for _, choice in apart.choices} == {"xla bf16"}


def test_what_was_measured_is_enough_to_decide_a_stack():
    sites, header = _sites(), Header("cpu", "1", "1", "", "x")
    times = {"training": {"xla bf16": 1000.0, DELAYED: 1100.0}}
    entries = {table_key(site.spec): Entry(times) for site in sites}
    model = PerformanceModel(Table(header, entries), roofline=H200).measured()
    plan = make_plan(sites, model, errors=as_if_accurate(sites))
    assert {choice.name for _, choice in plan.choices} == {DELAYED}


def test_a_layer_that_is_not_accurate_runs_in_bf16_within_the_stack():
    sites = _sites()
    nothing = {role: {} for role in ("fwd", "dlhs", "drhs")}
    times = {"xla bf16": 1000.0, DELAYED: 1100.0}
    plan = _plan(sites, times, errors={sites[1].path: nothing})
    assert [choice.is_fp8 for _, choice in plan.choices] == [True, False, True]
    refused = plan.decisions[1][1].runner_up
    assert refused == f"{DELAYED}: fwd: its error was not measured"


def test_sites_that_are_faster_apart_stay_apart():
    plan = _plan(_sites(), {"xla bf16": 1000.0, "pallas bf16": 1.0})
    assert {choice.name for _, choice in plan.choices} == {"pallas bf16"}


def test_narrow_layers_are_decided_by_themselves():
    plan = _plan(_sites(features=(256, 256)), {"xla bf16": 10.0, DELAYED: 11.0})
    assert {choice.name for _, choice in plan.choices} == {"xla bf16"}


def test_without_triton_nothing_is_one_operation(monkeypatch):
    monkeypatch.setattr(triton, "why_not_installed", lambda: "it is not installed")
    assert stacks.stacks(_sites()) == []


def test_norms_of_whole_rows_join_and_count_what_they_read_twice():
    recipe = "fp8_tensorwise_delayed"
    model = nn.Mlp((4096, 1024), recipe=recipe, norm="layer", fused=True)
    sites = nn.list_sites(model, jax.ShapeDtypeStruct((8192, 384), jnp.bfloat16))
    assert stacks.stacks(sites) == [range(2)]

    def bytes_of_a_value(norm, pass_name):
        spec = SiteSpec(8192, 4096, 4096, norm)
        us = stacks.layer_us(spec, get_recipe("bf16"), pass_name, H200)
        return us * H200.bytes_per_us / (8192 * 4096)

    for pass_name, read_twice in {"inference": 2, "training": 2 + 4}.items():
        layer, block = (
            bytes_of_a_value(norm, pass_name) for norm in ("layer", "block")
        )
        assert layer - block == pytest.approx(read_twice)


@pytest.mark.parametrize("arm", ["bf16", "fp8"])
@pytest.mark.parametrize("pass_name", ["training", "inference"])
@pytest.mark.parametrize("name", STACKS)
def test_predicted_times_are_those_measured(name, pass_name, arm):
    (run,) = (x for x in json.loads(RESULT.read_text())["runs"] if x["case"] == name)
    k, features, norm = STACKS[name]
    recipe = get_recipe("bf16" if arm == "bf16" else "fp8_tensorwise_delayed")
    us = 0.0
    for n in features:
        spec = SiteSpec(run["batch"], k, n, norm)
        us += stacks.layer_us(spec, recipe, pass_name, H200)
        k = n
    measured = run["programs"][f"{pass_name} tails {arm}"]["median_us"]
    assert us == pytest.approx(measured, rel=0.25)
