"""Exported models score as their evaluation steps do."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import nn, scaling
from loka_jax.data.generated import schema_of
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.export import folder, loader, programs
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.programs import evaluation_logits
from loka_jax.export.rows import Inputs
from loka_jax.ops.device import HOPPER
from loka_jax.predict.trained import make_untrained
from loka_jax.recipe import get_recipe
from loka_jax.site import Choice
from tests.support.configs import tiny
from tests.support.export import blank_dlrm


def test_a_cross_network_is_fused_in_evaluation_and_export(tmp_path):
    config = tiny("fp8_dcnv2")
    model = config.model.clone(implementation="group", recipe="fp8_tensorwise_delayed")
    schema = schema_of(config.data)
    start = make_untrained(dataclasses.replace(config, model=model), schema)
    one = scaling.stored(jnp.ones(3), get_recipe(model.recipe)).table
    scales = jax.tree.map(lambda _: one, start.state.fp8)
    trained = start._replace(state=dataclasses.replace(start.state, fp8=scales))
    form = programs.make_form(trained, "cpu", 32, DispatchPlan())
    spec = inputs_as_given(schema)
    found = folder.write_model(trained, spec, iter([form]), tmp_path / "model")
    assert form.model.scales_initialized
    assert found.differences == {32: 0.0}
    apart = form._replace(model=nn.Planned(model))
    rows = loader.load(tmp_path / "model").encoding.blank(32)
    # Of the package's type: a folder has its own copy of the file that has it.
    inputs = Inputs(*rows._replace(dense=np.ones_like(rows.dense)))
    logits = evaluation_logits(trained, form, inputs)
    assert not np.array_equal(logits, evaluation_logits(trained, apart, inputs))


def kernels_of(trained, rows):
    """Returns a plan with Mosaic's kernels at every site."""
    decision = Decision(Choice.parse(f"pallas {trained.config.model.recipe}"), "asked")
    sites = trained.model.list_sites(DispatchPlan(), rows)
    return DispatchPlan(tuple((s.path, decision) for s in sites if s.has_choice))


@pytest.mark.parametrize(
    "norm, recipe",
    [
        ("rms", "fp8_tensorwise_delayed"),
        ("block", "fp8_tensorwise_delayed_bf16_drhs"),
        ("layer", "fp8_blockwise"),
    ],
)
def test_programs_for_a_hopper_gpu_are_given_what_they_were_made_for(
    norm, recipe, tmp_path, monkeypatch
):
    """Tracing compares the shape and dtype of each argument with the program's."""
    monkeypatch.setattr(programs, "_device_of", lambda platform: HOPPER)
    monkeypatch.setattr(folder, "runs_here", lambda platform: False)
    trained = blank_dlrm(norm=norm, recipe=recipe)
    plans = {1: kernels_of(trained, 1), 128: kernels_of(trained, 128)}
    plans[16] = DispatchPlan()  # each layer as it is where nothing is chosen
    made = (programs.make_form(trained, "cuda", *item) for item in plans.items())
    out = tmp_path / "model"
    found = folder.write_model(trained, inputs_as_given(trained.schema), made, out)
    by_mosaic = {p.compute_capability == "9.0" for p in found.programs}
    assert by_mosaic == {recipe != "fp8_blockwise"}
    monkeypatch.setattr(loader, "COMPILER_OPTIONS", None)  # refused where one traces
    description = json.loads((out / loader.MODEL).read_text())
    model = loader.Model(out, description, description["programs"])
    for rows in plans:
        logits = jax.eval_shape(model.program(rows), model.encoding.blank(rows))
        assert logits.shape == (rows,)
