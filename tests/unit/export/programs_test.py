"""The loader gives every program weights of the shapes that it was made for."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs import find_config
from loka_jax.data.generated import schema_of
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.export import folder, forms, loader
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.programs import Weights, make_program
from loka_jax.ops.device import HOPPER
from loka_jax.predict.trained import untrained
from loka_jax.site import Choice


def untrained_dlrm(**options):
    """Returns a small DLRM with two layers that Mosaic's kernels serve."""
    config = find_config("fp8_dlrm")
    data = dataclasses.replace(config.data, rows=(5, 4, 3))
    model = config.model.clone(**options)
    config = dataclasses.replace(config, data=data, model=model)
    return untrained(config, schema_of(data))


def kernels_of(trained, rows):
    """Returns a plan with Mosaic's kernels at every site."""
    decision = Decision(Choice.parse(f"pallas {trained.config.model.recipe}"), "asked")
    sites = trained.network.sites_at(DispatchPlan(), rows)
    return DispatchPlan(tuple((s.path, decision) for s in sites if s.has_choice))


def traced(out, monkeypatch):
    """Returns the logits' shapes by batch size, of programs for any platform.

    Tracing compares the shape and dtype of each argument with the program's.
    """
    monkeypatch.setattr(loader, "COMPILER_OPTIONS", None)  # refused where one traces
    description = json.loads((out / loader.MODEL).read_text())
    model = loader.Model(out, description, description["programs"])
    return {
        size: jax.eval_shape(model.program(size), model.encoding.blank(size)).shape
        for size in model.batch_sizes
    }


@pytest.mark.parametrize(
    "norm, recipe, fused_wide",
    [
        ("none", "fp8_tensorwise", False),
        ("rms", "fp8_tensorwise_delayed", False),
        ("layer", "fp8_rowwise", False),
        ("block", "fp8_tensorwise_delayed_bf16_drhs", True),
        ("layer", "fp8_blockwise", True),
    ],
)
def test_programs_for_a_hopper_gpu_are_given_what_they_were_made_for(
    norm, recipe, fused_wide, tmp_path, monkeypatch
):
    monkeypatch.setattr(forms, "_device_of", lambda platform: HOPPER)
    monkeypatch.setattr(folder, "runs_here", lambda platform: False)
    trained = untrained_dlrm(norm=norm, recipe=recipe, fused_wide=fused_wide)
    plans = {1: kernels_of(trained, 1), 128: kernels_of(trained, 128)}
    plans[16] = DispatchPlan()  # each layer as it is where nothing is chosen
    made = (forms.make_form(trained, "cuda", *item) for item in plans.items())
    out = tmp_path / "model"
    found = folder.write_model(trained, inputs_as_given(trained.schema), made, out)
    by_mosaic = {p.compute_capability == "9.0" for p in found.programs}
    assert by_mosaic == {recipe != "fp8_blockwise"}
    assert traced(out, monkeypatch) == {rows: (rows,) for rows in plans}


def test_without_its_kernels_a_program_runs_on_every_gpu(monkeypatch):
    monkeypatch.setattr(forms, "_device_of", lambda platform: HOPPER)
    trained, weights = untrained_dlrm(), Weights()
    encoding = loader.Encoding(*inputs_as_given(trained.schema))
    asked = trained, "cuda", 128, DispatchPlan()
    made = [forms.make_form(*asked, by_xla=by_xla) for by_xla in (False, True)]
    programs = [make_program(trained, form, encoding, weights) for form in made]
    assert [p.compute_capability for p in programs] == ["9.0", None]
    assert all(runs.startswith("xla ") for runs in made[1].runs.values())


def test_only_weights_of_one_shape_and_dtype_are_kept_once():
    """All of these have the same bytes."""
    ones = jnp.ones(()), jnp.ones((1,)), jnp.ones((1, 1)), jnp.full((), 0x3F800000)
    matrices = jnp.ones((2, 3)), jnp.ones((3, 2))
    weights = Weights()
    for weight in (*ones, *matrices) * 2:
        kept = weights.arrays[weights.add(weight)]
        assert (kept.shape, kept.dtype) == (weight.shape, weight.dtype)
        assert np.array_equal(kept, weight)
    assert len(weights.arrays) == len(ones) + len(matrices)
