"""What runs at the sites of an exported program."""

import dataclasses

import pytest

from experiments.configs import find_config
from loka_jax.data.generated import schema_of
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.first_use import CheckedPlan
from loka_jax.dispatch.local import Local, shipped_path
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.export import forms, loader, programs
from loka_jax.export.encoding import inputs_as_given
from loka_jax.nn import Planned
from loka_jax.ops.device import HOPPER
from loka_jax.ops.plan import resolve
from loka_jax.predict.trained import untrained
from loka_jax.site import Choice

ROWS = (5, 4, 3)  # of the tables


@pytest.fixture(scope="module")
def trained():
    config = find_config("fp8_dlrm")
    data = dataclasses.replace(config.data, rows=ROWS)
    return untrained(dataclasses.replace(config, data=data), schema_of(data))


def plan(**choices):
    decisions = ((k, Decision(Choice.parse(v), "asked")) for k, v in choices.items())
    return DispatchPlan(tuple(decisions))


def sites(trained, rows):
    return trained.network.sites_at(DispatchPlan(), rows)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_kernel_that_cannot_be_exported_has_its_twin(trained, platform):
    first, second = (site.path for site in sites(trained, 64)[:2])
    asked = {first: "triton fp8_rowwise", second: "pallas fp8_rowwise"}
    form = forms.make_form(trained, platform, 64, plan(**asked))
    assert dict(form.model.choices) == {
        path: Choice.parse("xla fp8_rowwise") for path in asked
    }
    assert "triton fp8_rowwise: JAX promises nothing" in form.twins[first]
    assert "pallas fp8_rowwise: " in form.twins[second]
    # The dot products of pairs run by Triton on a Hopper GPU only.
    assert ("operations between sites" in form.twins) == (platform == "cuda")


def test_dispatch_chooses_at_each_batch_size(trained, monkeypatch):
    table = tables.read(shipped_path("NVIDIA H200"))
    performance = PerformanceModel(table, fitted=table, device=HOPPER)
    monkeypatch.setattr(forms, "runs_here", lambda platform: platform == "cuda")
    monkeypatch.setattr(forms, "local_performance", lambda: Local(performance))
    seen = []

    def unchecked(make_plan, sites, performance, *_, pass_name):
        assert pass_name == "inference"
        seen.append({site.spec.m for site in sites})
        return CheckedPlan(make_plan(performance), performance)

    monkeypatch.setattr(forms, "check_plan", unchecked)
    names = [
        {
            path: choice.name
            for path, choice in forms.plan_of(
                "auto", DispatchPlan(), trained, ("cuda", rows), print
            ).choices
        }
        for rows in (16, 65536)
    ]
    assert seen == [{16}, {65536}]
    assert names[0].keys() == names[1].keys() and names[0] != names[1]


def test_without_its_gpu_a_program_keeps_the_runs_recipes(trained, monkeypatch):
    monkeypatch.setattr(forms, "runs_here", lambda platform: platform == "cpu")
    saved = plan(**{sites(trained, 16)[0].path: "xla bf16"})
    for form in (("cpu", 16), ("cuda", 16)):
        assert forms.plan_of("auto", saved, trained, form, print) is saved
        assert forms.plan_of("off", saved, trained, form, print) == DispatchPlan()


def test_mosaic_kernels_are_exported_for_their_gpu(trained):
    model = trained.config.model.clone(norm="layer")
    config = dataclasses.replace(trained.config, model=model)
    normed = untrained(config, trained.schema)
    choice = Choice.parse("pallas fp8_rowwise")
    path = next(
        site.path
        for site in sites(normed, 128)
        if resolve(site.spec, choice, HOPPER).why_not is None
    )
    form = forms.Form("cuda", 128, Planned(model, ((path, choice),)), HOPPER, {}, {})
    encoding = loader.Encoding(*inputs_as_given(normed.schema))
    made = programs.make_program(normed, form, encoding, programs.Weights())
    assert made.compute_capability == "9.0"
    assert b"mosaic_gpu_v2" in made.content
