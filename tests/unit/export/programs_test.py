"""Weights are kept once; a program names the only GPU that it runs on."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.dispatch.plan import DispatchPlan
from loka_jax.export import forms, loader, programs
from loka_jax.export.encoding import inputs_as_given
from loka_jax.export.programs import Weights, make_program
from loka_jax.ops.device import HOPPER
from tests.support.export import blank_dlrm


@pytest.mark.parametrize("kernels, capability", [("mosaic_gpu_v2", "9.0"), ("", None)])
def test_a_program_with_kernels_names_their_gpu(monkeypatch, kernels, capability):
    ready = [jnp.ones(2), jnp.zeros(3)]
    exported = SimpleNamespace(
        mlir_module=lambda: f"call @{kernels}", serialize=lambda: bytearray(b"program")
    )
    monkeypatch.setattr(programs, "export_function", lambda *_: (exported, ready))
    trained, weights = blank_dlrm(), Weights()
    runs = {"site": "pallas"}
    form = forms.Form("cuda", 16, trained.config.model, HOPPER, runs, {"a": "b"})
    encoding = loader.Encoding(*inputs_as_given(trained.schema))
    program = make_program(trained, form, encoding, weights)
    assert program.content == b"program" and len(weights.arrays) == 2
    expected = {"platform": "cuda", "batch_size": 16, "compute_capability": capability}
    expected |= {"weights": [*weights.arrays], "sites": runs, "twins": {"a": "b"}}
    assert program.as_json() == expected


def test_without_its_kernels_a_form_is_for_every_gpu(monkeypatch):
    monkeypatch.setattr(forms, "_device_of", lambda platform: HOPPER)
    asked = blank_dlrm(), "cuda", 128, DispatchPlan()
    with_kernels, form = [forms.make_form(*asked, by_xla=x) for x in (False, True)]
    assert with_kernels.device == HOPPER
    assert any("pallas" in runs for runs in with_kernels.runs.values())
    assert form.device.compute_capability is None
    assert all(runs.startswith("xla ") for runs in form.runs.values())


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
