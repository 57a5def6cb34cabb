"""What runs at the sites of a program; it names its weights and its GPU."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from loka_jax import nn
from loka_jax.data import transforms
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.first_use import CheckedPlan
from loka_jax.dispatch.local import Local, shipped_path
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.export import programs
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.rows import Encoding
from loka_jax.ops.device import HOPPER
from loka_jax.site import Choice
from tests.support.export import blank_dlrm


@pytest.fixture(scope="module")
def trained():
    return blank_dlrm()


def plan(**choices):
    decisions = ((k, Decision(Choice.parse(v), "asked")) for k, v in choices.items())
    return DispatchPlan(tuple(decisions))


def sites(trained, rows):
    return [site.path for site in trained.model.list_sites(DispatchPlan(), rows)]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_kernel_that_cannot_be_exported_has_its_twin(trained, platform):
    first, second, *_ = sites(trained, 64)
    asked = {first: "triton fp8_rowwise", second: "pallas fp8_rowwise"}
    form = programs.make_form(trained, platform, 64, plan(**asked))
    assert dict(form.model.choices) == {
        path: Choice.parse("xla fp8_rowwise") for path in asked
    }
    assert "triton fp8_rowwise: JAX promises nothing" in form.twins[first]
    assert "pallas fp8_rowwise: " in form.twins[second]
    # The dot products of pairs run by Triton on a Hopper GPU only.
    assert ("operations between sites" in form.twins) == (platform == "cuda")


def test_dispatch_chooses_at_each_batch_size(trained, monkeypatch):
    table = tables.read(shipped_path("NVIDIA H200"))
    performance = PerformanceModel.of(table, fitted=table, device=HOPPER)
    monkeypatch.setattr(programs, "runs_here", lambda platform: platform == "cuda")
    monkeypatch.setattr(programs, "local_performance", lambda: Local(performance))
    seen = []

    def unchecked(make_plan, sites, performance, *_, pass_name):
        assert pass_name == "inference"
        seen.append({site.spec.m for site in sites})
        return CheckedPlan(make_plan(performance), performance)

    monkeypatch.setattr(programs, "check_plan", unchecked)
    names = []
    for rows in (16, 65536):
        asked = "auto", DispatchPlan(), trained, ("cuda", rows)
        choices = programs.plan_of(*asked).choices
        names.append({path: choice.name for path, choice in choices})
    assert seen == [{16}, {65536}]
    assert names[0].keys() == names[1].keys() and names[0] != names[1]


def test_without_its_gpu_a_program_keeps_the_runs_recipes(trained, monkeypatch):
    monkeypatch.setattr(programs, "runs_here", lambda platform: platform == "cpu")
    saved = plan(**{sites(trained, 16)[0]: "xla bf16"})
    for form in (("cpu", 16), ("cuda", 16)):
        assert programs.plan_of("auto", saved, trained, form) is saved
        assert programs.plan_of("off", saved, trained, form) == DispatchPlan()


@pytest.mark.parametrize("kernels, capability", [("mosaic_gpu_v2", "9.0"), ("", None)])
def test_a_program_with_kernels_names_their_gpu(monkeypatch, kernels, capability):
    ready = [jnp.ones(2), jnp.zeros(3)]
    exported = SimpleNamespace(
        mlir_module=lambda: f"call @{kernels}", serialize=lambda: bytearray(b"program")
    )
    monkeypatch.setattr(programs, "export_function", lambda *_: (exported, ready))
    trained, weights = blank_dlrm(), []
    runs = {"site": "pallas"}
    model = nn.Planned(trained.config.model)
    form = programs.Form("cuda", 16, model, HOPPER, runs, {"a": "b"})
    encoding = Encoding(*inputs_as_given(trained.schema), transforms)
    program = programs.make_program(trained, form, encoding, weights)
    assert program.content == b"program" and len(weights) == 2
    expected = {"platform": "cuda", "batch_size": 16, "compute_capability": capability}
    expected |= {
        "weights": ["weight_0", "weight_1"],
        "sites": runs,
        "twins": {"a": "b"},
    }
    assert program.as_json() == expected


def test_without_its_kernels_a_form_is_for_every_gpu(monkeypatch):
    monkeypatch.setattr(programs, "_device_of", lambda platform: HOPPER)
    asked = blank_dlrm(), "cuda", 128, DispatchPlan()
    with_kernels, form = [programs.make_form(*asked, by_xla=x) for x in (False, True)]
    assert with_kernels.device == HOPPER
    assert any("pallas" in runs for runs in with_kernels.runs.values())
    assert form.device.compute_capability is None
    assert all(runs.startswith("xla ") for runs in form.runs.values())
