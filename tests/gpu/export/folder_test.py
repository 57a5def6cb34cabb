"""Exported kernels of Mosaic run on their GPU where only jax is installed."""

import dataclasses

import numpy as np
import pytest

from experiments.configs import find_config
from loka_jax.data.generated import schema_of
from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.dispatch.policy import Decision
from loka_jax.export import loader
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.folder import write_model
from loka_jax.export.programs import make_form
from loka_jax.predict.trained import make_untrained
from loka_jax.site import Choice
from tests.support.export import in_a_clean_environment

pytestmark = pytest.mark.gpu


def test_mosaic_kernels_run_where_only_jax_is_installed(tmp_path):
    config = find_config("fp8_dlrm")
    model = config.model.clone(norm="layer", recipe="fp8_rowwise")
    schema = schema_of(config.data)
    trained = make_untrained(dataclasses.replace(config, model=model), schema)
    sites = trained.model.list_sites(DispatchPlan(), 128)
    decision = Decision(Choice.parse("pallas fp8_rowwise"), "asked")
    plan = DispatchPlan(tuple((s.path, decision) for s in sites if s.has_choice))
    form = make_form(trained, "cuda", 128, plan)
    spec, out = inputs_as_given(schema), tmp_path / "model"
    found = write_model(trained, spec, iter([form]), out)
    assert found.programs[0].compute_capability is not None
    assert found.differences == {128: 0.0}
    rows = {name: [1, 2, 3] for name in loader.load(out).encoding.columns}
    scores, _ = in_a_clean_environment(out, rows, tmp_path, "cuda")
    np.testing.assert_allclose(scores, loader.load(out).scores(rows), atol=1e-3)
