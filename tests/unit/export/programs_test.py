"""A program names its weights, and the only GPU that it runs on."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.export import forms, loader, programs
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.programs import make_program
from loka_jax.ops.device import HOPPER
from tests.support.export import blank_dlrm


@pytest.mark.parametrize("kernels, capability", [("mosaic_gpu_v2", "9.0"), ("", None)])
def test_a_program_with_kernels_names_their_gpu(monkeypatch, kernels, capability):
    ready = [jnp.ones(2), jnp.zeros(3)]
    exported = SimpleNamespace(
        mlir_module=lambda: f"call @{kernels}", serialize=lambda: bytearray(b"program")
    )
    monkeypatch.setattr(programs, "export_function", lambda *_: (exported, ready))
    trained, weights = blank_dlrm(), []
    runs = {"site": "pallas"}
    form = forms.Form("cuda", 16, trained.config.model, HOPPER, runs, {"a": "b"})
    encoding = loader.Encoding(*inputs_as_given(trained.schema))
    program = make_program(trained, form, encoding, weights)
    assert program.content == b"program" and len(weights) == 2
    expected = {"platform": "cuda", "batch_size": 16, "compute_capability": capability}
    expected |= {
        "weights": ["weight_0", "weight_1"],
        "sites": runs,
        "twins": {"a": "b"},
    }
    assert program.as_json() == expected


def test_without_its_kernels_a_form_is_for_every_gpu(monkeypatch):
    monkeypatch.setattr(forms, "_device_of", lambda platform: HOPPER)
    asked = blank_dlrm(), "cuda", 128, DispatchPlan()
    with_kernels, form = [forms.make_form(*asked, by_xla=x) for x in (False, True)]
    assert with_kernels.device == HOPPER
    assert any("pallas" in runs for runs in with_kernels.runs.values())
    assert form.device.compute_capability is None
    assert all(runs.startswith("xla ") for runs in form.runs.values())
