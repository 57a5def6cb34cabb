"""Sites that run as one operation are decided as one."""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from loka_jax import nn, triton
from loka_jax.dispatch import group_times
from loka_jax.dispatch.candidates import candidates
from loka_jax.dispatch.first_use import as_if_accurate
from loka_jax.dispatch.groups import cross_networks
from loka_jax.dispatch.plan import make_plan
from loka_jax.dispatch.review import Reviewer
from loka_jax.dispatch.table import MEASURES
from loka_jax.measure.intervals import Interval
from loka_jax.models import Dcnv2
from loka_jax.normed import NormName
from loka_jax.ops.device import Device
from loka_jax.recipe import ROLES, get_recipe
from loka_jax.site import SiteSpec
from tests.support.dispatch import H200, model_of

DELAYED = "xla fp8_tensorwise_delayed"
IN_GROUP = "group fp8_tensorwise_delayed"
NOTHING = {role: {} for role in ROLES}
SLOWER = {"xla bf16": 1000.0, DELAYED: 1100.0}
RESULTS = pathlib.Path(__file__).parents[3] / "experiments/results"
STACKS: dict[str, tuple[int, tuple[int, ...], NormName]] = {  # of the result
    "wukong_m": (2048, (2048, 2048, 2048, 4096), "block"),
    "wukong_l": (4608, (4096, 4096, 4096, 7680), "block"),
    "mlperf": (3456, (1024, 1024, 512, 256), "none"),
}


@pytest.fixture(autouse=True)
def triton_is_installed(monkeypatch):
    monkeypatch.setattr(triton, "why_not_installed", lambda: None)


def _sites(features=(4096, 4096, 1024)):
    model = nn.Mlp(features, recipe="fp8_tensorwise_delayed")
    return nn.list_sites(model, jax.ShapeDtypeStruct((8192, 384), jnp.bfloat16))


def _plan(sites, times, *, errors=None):
    model = model_of(sites, times, roofline=H200)
    # By what was measured alone, as by predictions.
    plan, measured = (
        make_plan(sites, x, errors=as_if_accurate(sites) | (errors or {}))
        for x in (model, model.measured())
    )
    assert plan.choices == measured.choices
    return plan


def test_fp8_of_a_stack_is_taken_though_its_casts_cost_sites_alone_more():
    plan = _plan(_sites(), SLOWER)
    assert {choice.name for _, choice in plan.choices} == {IN_GROUP}
    decision = plan.decisions[1][1]
    assert decision.spread == group_times.SPREAD
    assert "as one operation" in decision.reason
    apart = _plan(_sites((512, 512)), SLOWER)  # narrow
    assert {choice.name for _, choice in apart.choices} == {"xla bf16"}


def test_a_layer_that_is_not_accurate_runs_in_bf16_within_the_stack():
    sites = _sites()
    plan = _plan(sites, SLOWER, errors={sites[1].path: NOTHING})
    assert [choice.is_fp8 for _, choice in plan.choices] == [True, False, True]
    refused = plan.decisions[1][1].runner_up
    assert refused == f"{DELAYED}: fwd: its error was not measured"


@pytest.mark.parametrize("capability", ["8.9", "10.0"])
def test_nothing_is_priced_by_kernels_that_do_not_run_on_a_device(capability):
    device = Device(compute_capability=capability)
    times = SLOWER | {"triton fp8_tensorwise": 1.0, "pallas fp8_rowwise": 1.0}
    for sites in (_sites(), _cross_sites()):
        model = model_of(sites, times, roofline=H200, device=device)
        plan = make_plan(sites, model, errors=as_if_accurate(sites))
        assert set(_names(dict(plan.decisions)).values()) == {"xla bf16"}
        names = {c.provider for c in candidates(sites[0].spec, device)}
        assert names == {"xla"}


def test_sites_that_are_faster_apart_stay_apart():
    plan = _plan(_sites(), {"xla bf16": 1000.0, "pallas bf16": 1.0})
    assert {choice.name for _, choice in plan.choices} == {"pallas bf16"}


@pytest.mark.parametrize("name", STACKS)
def test_predicted_times_are_those_measured(name):
    runs = json.loads((RESULTS / "wide_stack_h200.json").read_text())["runs"]
    (run,) = (x for x in runs if x["case"] == name)
    k, features, norm = STACKS[name]
    sizes = itertools.pairwise((k, *features))
    specs = [SiteSpec(run["batch"], k, n, norm) for k, n in sizes]
    recipes = {"bf16": "bf16", "fp8": "fp8_tensorwise_delayed"}
    for pass_name, arm in itertools.product(("training", "inference"), recipes):
        recipe = get_recipe(recipes[arm])
        us = sum(group_times.dense_us(spec, recipe, pass_name, H200) for spec in specs)
        measured = run["programs"][f"{pass_name} tails {arm}"]["median_us"]
        assert us == pytest.approx(measured, rel=0.25)


ALONE = {"xla bf16": 10_000.0, DELAYED: 11_000.0}


def _cross_sites(rank=None):
    network = nn.CrossNet(3, rank, recipe="fp8_tensorwise_delayed")
    return nn.list_sites(network, jax.ShapeDtypeStruct((65536, 3456), jnp.bfloat16))


def _cross_plan(sites, *, errors=None, roles=ROLES):
    name = "training" if roles == ROLES else "inference"
    model = model_of(sites, ALONE, name, roofline=H200)
    errors = as_if_accurate(sites) | (errors or {})
    plan = make_plan(sites, model, errors=errors, roles=roles)
    return {path: decision for path, decision in plan.decisions if path != "head"}


def _names(decisions):
    return {path: decision.choice.name for path, decision in decisions.items()}


@pytest.mark.parametrize("rank", [None, 512])
@pytest.mark.parametrize("roles", [ROLES, ("fwd",)])
def test_fp8_of_a_network_is_taken_though_its_sites_alone_are_slower(rank, roles):
    decisions = _cross_plan(_cross_sites(rank=rank), roles=roles)
    assert set(_names(decisions).values()) == {IN_GROUP}
    assert len(decisions) == (3 if rank is None else 6)
    for decision in decisions.values():
        assert "whole cross network" in decision.reason
        assert decision.spread == group_times.SPREAD
        assert decision.speedup is not None and decision.speedup > 1.05


def test_a_site_that_is_not_accurate_keeps_its_network_apart():
    sites = _cross_sites()
    decisions = _cross_plan(sites, errors={sites[1].path: NOTHING})
    assert set(_names(decisions).values()) == {"xla bf16"}
    whole = f"{DELAYED} of the whole cross network: fwd: its error was not measured"
    assert {decision.runner_up for decision in decisions.values()} == {whole}


def test_layers_beside_a_network_are_a_part_of_it():
    model = Dcnv2(deep_mlp=(256, 256), structure="parallel")
    model = model.clone(recipe="fp8_tensorwise_delayed")
    shapes = (65536, 16), (65536, 27, 128)
    features = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sites = nn.list_sites(model, *features)
    (network,) = cross_networks(sites)
    beside = [site.path for site in sites if site.path not in (*network, "head")]
    assert beside == ["deep_mlp/dense_0", "deep_mlp/dense_1"]
    names = _names(_cross_plan(sites))
    assert names.pop(beside[-1]) == "group bf16"  # the head reads it
    assert set(names.values()) == {IN_GROUP}
    scored = _names(_cross_plan(sites, roles=("fwd",)))
    assert set(scored.values()) == {IN_GROUP} and beside[-1] in scored
    # One that cannot be keeps only itself and its neighbours apart.
    names = _names(_cross_plan(sites, errors={"deep_mlp/dense_1": NOTHING}))
    assert {names[f"cross/u_{i}"] for i in range(3)} == {IN_GROUP}
    assert names["deep_mlp/dense_1"] == "group bf16"


def test_a_network_changes_as_a_whole_by_live_errors():
    sites = _cross_sites()
    model, errors = model_of(sites, ALONE, roofline=H200), as_if_accurate(sites)
    plan = make_plan(sites, model, errors=errors)
    reviewer, (first, second) = Reviewer(sites, model), [x.path for x in sites[:2]]
    assert reviewer.review(plan, errors) == ({}, {})
    one = dict.fromkeys(MEASURES, Interval(1.0, 1.0, 1.0))
    bad = {role: dict.fromkeys(x, one) for role, x in errors[second].items()}
    worse = errors | {second: bad}
    demoted, promoted = reviewer.review(plan, worse)
    assert _names(demoted) == dict.fromkeys(errors, "xla bf16") and not promoted
    assert "live error" in demoted[second].reason
    assert demoted[first].reason == "as its cross network changes"
    after = plan.changed(demoted)
    assert reviewer.review(after, worse) == ({}, {})
    # Back once all are accurate, the first as well.
    demoted, promoted = reviewer.review(after, errors)
    assert set(_names(promoted).values()) == {IN_GROUP} and not demoted
