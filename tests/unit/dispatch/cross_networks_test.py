"""A cross network, and layers beside it, are decided as one operation."""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from loka_jax import nn, triton
from loka_jax.dispatch import cross_networks, stacks
from loka_jax.dispatch.candidates import table_key
from loka_jax.dispatch.first_use import as_if_accurate
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import chains_of, make_plan
from loka_jax.dispatch.review import Reviewer
from loka_jax.dispatch.table import Entry, Table
from loka_jax.measure.intervals import Interval
from loka_jax.models import Dcnv2
from loka_jax.recipe import ROLES, get_recipe
from tests.support.dispatch import H200

DELAYED = "xla fp8_tensorwise_delayed"
ALONE = {"xla bf16": 10_000.0, DELAYED: 11_000.0}
RESULT = pathlib.Path(__file__).parents[3] / "experiments/results/wide_models_h200.json"


@pytest.fixture(autouse=True)
def triton_is_installed(monkeypatch):
    monkeypatch.setattr(triton, "why_not_installed", lambda: None)


def _sites(rows=65536, width=3456, rank=None, depth=3, fused=True):
    network = nn.CrossNet(depth, rank, recipe="fp8_tensorwise_delayed", fused=fused)
    x0 = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    return nn.list_sites(network, x0)


def _sites_of_dcnv2(structure, deep_mlp=(256, 256)):
    model = Dcnv2(
        recipe="fp8_tensorwise_delayed",
        deep_mlp=deep_mlp,
        structure=structure,
        fused_wide=True,
    )
    shapes = (65536, 16), (65536, 27, 128)
    features = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return nn.list_sites(model, *features)


def _plan(sites, times=ALONE, *, errors=None, roles=ROLES):
    header = Header("cpu", "1", "1", "", "x")
    name = "training" if roles == ROLES else "inference"
    entries = {table_key(site.spec): Entry({name: times}) for site in sites}
    model = PerformanceModel(Table(header, entries), roofline=H200)
    errors = as_if_accurate(sites) | (errors or {})
    plan = make_plan(sites, model, errors=errors, roles=roles)
    return {path: decision for path, decision in plan.decisions if path != "head"}


def _names(decisions):
    return {path: decision.choice.name for path, decision in decisions.items()}


@pytest.mark.parametrize("rank", [None, 512])
@pytest.mark.parametrize("roles", [ROLES, ("fwd",)])
def test_fp8_of_a_network_is_taken_though_its_sites_alone_are_slower(rank, roles):
    decisions = _plan(_sites(rank=rank), roles=roles)
    assert set(_names(decisions).values()) == {DELAYED}
    assert len(decisions) == (3 if rank is None else 6)
    for decision in decisions.values():
        assert "whole cross network" in decision.reason
        assert decision.spread == stacks.SPREAD
        assert decision.speedup is not None and decision.speedup > 1.05


def test_layers_one_by_one_are_decided_one_by_one():
    assert cross_networks.networks(chains_of(_sites(fused=False))) == []


def test_a_site_that_is_not_accurate_keeps_its_network_apart():
    sites = _sites()
    nothing = {role: {} for role in ROLES}
    decisions = _plan(sites, errors={sites[1].path: nothing})
    assert set(_names(decisions).values()) == {"xla bf16"}
    whole = f"{DELAYED} of the whole cross network: fwd: its error was not measured"
    assert {decision.runner_up for decision in decisions.values()} == {whole}


def test_a_network_that_is_faster_apart_stays_apart():
    assert set(_names(_plan(_sites(), {"xla bf16": 1.0, DELAYED: 1.1})).values()) == {
        "xla bf16"
    }


def test_small_networks_stay_apart():
    sites = _sites(rows=64, width=48)
    # As long as an H200 takes for the products of such a site.
    assert set(_names(_plan(sites, {"xla bf16": 9.0, DELAYED: 20.0})).values()) == {
        "xla bf16"
    }


def test_layers_beside_a_network_are_a_part_of_it():
    sites = _sites_of_dcnv2("parallel")
    (network,) = cross_networks.networks(chains_of(sites))
    assert [site.path for site in network.beside] == [
        "deep_mlp/dense_0",
        "deep_mlp/dense_1",
    ]
    assert set(_names(_plan(sites)).values()) == {DELAYED}
    # One that cannot be keeps only itself and its neighbours apart.
    nothing = {role: {} for role in ROLES}
    names = _names(_plan(sites, errors={"deep_mlp/dense_1": nothing}))
    assert {names[f"cross/u_{i}"] for i in range(3)} == {DELAYED}
    assert names["deep_mlp/dense_1"] == "xla bf16"


def test_layers_beside_a_network_may_end_in_bfloat16():
    sites = _sites_of_dcnv2("parallel", (1024, 1024, 128))
    decisions = _plan(sites)
    last = decisions.pop("deep_mlp/dense_2")
    assert last.choice.name == "xla bf16"
    assert last.runner_up == f"{DELAYED}: its recipe is bf16"
    assert set(_names(decisions).values()) == {DELAYED}
    for path, decision in decisions.items():
        is_joined = path.startswith(("cross/", "deep_mlp/"))
        assert ("whole cross network" in decision.reason) == is_joined, path


def test_a_small_last_layer_behind_a_network_stays_in_bfloat16():
    decisions = _plan(_sites_of_dcnv2("stacked", (1024, 1024, 128)))
    last = decisions.pop("deep_mlp/dense_2")
    assert last.choice.name == "xla bf16"
    assert last.runner_up == f"{DELAYED}: its recipe is bf16"
    assert set(_names(decisions).values()) == {DELAYED}


def test_layers_behind_a_network_are_none_beside_it():
    sites = _sites_of_dcnv2("stacked")
    (network,) = cross_networks.networks(chains_of(sites))
    assert network.beside == ()


def test_without_triton_no_network_is_one_operation(monkeypatch):
    monkeypatch.setattr(triton, "why_not_installed", lambda: "it is not installed")
    assert cross_networks.networks(chains_of(_sites())) == []


# Rows, width, rank and depth. The longest kernels of training at 65,536 rows lack some.
PASSES = {
    ("mlperf_dcnv2 8192", "training"): (8192, 3456, 512, 3),
    ("mlperf_dcnv2 8192", "inference"): (8192, 3456, 512, 3),
    ("mlperf_dcnv2 65536", "inference"): (65536, 3456, 512, 3),
    ("dcnv2 plain 65536", "training"): (65536, 448, None, 2),
    ("dcnv2 plain 65536", "inference"): (65536, 448, None, 2),
}
KERNELS = ("cross_tail_kernel", "cross_gradient_kernel", "joined_cast_kernel")


@pytest.mark.parametrize("name, pass_name", PASSES)
def test_predicted_passes_take_the_time_of_kernels(name, pass_name):
    (network,) = cross_networks.networks(chains_of(_sites(*PASSES[name, pass_name])))
    recipe = get_recipe("fp8_tensorwise_delayed")
    moved = cross_networks.passes_bytes(network.sites, recipe, pass_name)
    predicted = cross_networks.PASSES * moved / H200.bytes_per_us
    longest = json.loads(RESULT.read_text())["runs"][name][f"{pass_name} ours fp8"]
    measured = sum(us for kernel, us, _ in longest["longest"] if kernel in KERNELS)
    assert predicted == pytest.approx(measured, rel=0.3)


def test_a_network_has_the_sites_of_its_path_alone():
    sites = _sites(rank=512)
    other = [s for s in sites if s.crosses]
    (network,) = cross_networks.networks(chains_of(sites))
    assert list(network.sites) == other
    assert all(site.crosses == 2 for site in network.sites)
    pairs = itertools.batched((s.path.rpartition("/")[2][0] for s in other), 2)
    assert set(pairs) == {("v", "u")}


def test_a_network_changes_as_a_whole_by_live_errors():
    sites = _sites()
    header = Header("cpu", "1", "1", "", "x")
    entries = {table_key(site.spec): Entry({"training": ALONE}) for site in sites}
    model = PerformanceModel(Table(header, entries), roofline=H200)
    errors = as_if_accurate(sites)
    plan = make_plan(sites, model, errors=errors)
    reviewer = Reviewer(sites, model)
    assert reviewer.review(plan, errors) == ({}, {})
    bad = {
        role: {
            name: dict.fromkeys(measures, Interval(1.0, 1.0, 1.0))
            for name, measures in of_role.items()
        }
        for role, of_role in errors[sites[1].path].items()
    }
    worse = errors | {sites[1].path: bad}
    demoted, promoted = reviewer.review(plan, worse)
    assert {d.choice.name for d in demoted.values()} == {"xla bf16"} and not promoted
    assert demoted.keys() == errors.keys()
    assert "live error" in demoted[sites[1].path].reason
    assert demoted[sites[0].path].reason == "as its cross network changes"
    after = plan.changed(demoted)
    assert reviewer.review(after, worse) == ({}, {})
    # Back once all are accurate, the first as well.
    demoted, promoted = reviewer.review(after, errors)
    assert {d.choice.name for d in promoted.values()} == {DELAYED} and not demoted
