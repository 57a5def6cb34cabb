"""What is known of a machine: which table, which cache, which notes."""

import dataclasses

import pytest

from loka_jax.dispatch import local
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.local import cache_path, fitted_table, local_performance
from loka_jax.dispatch.table import Entry, Table
from loka_jax.ops.device import Device
from loka_jax.site import BF16, SiteSpec
from tests.support.stand_ins import ROOFLINE

SPEC = SiteSpec(5000, 448, 256, "none", "relu", True)


class Gpu:
    platform = "gpu"

    def __init__(self, device_kind, compute_capability):
        self.device_kind = device_kind
        self.compute_capability = compute_capability


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Returns a function that stands a GPU in; its roofline is measured once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []
    monkeypatch.setattr(
        local, "measure_roofline", lambda: measured.append(1) or ROOFLINE
    )

    def stand_in(device_kind, compute_capability="9.0", **versions):
        gpu = Gpu(device_kind, compute_capability)
        monkeypatch.setattr(local.jax, "devices", lambda: [gpu])
        device = Device(compute_capability=compute_capability)
        monkeypatch.setattr(local, "local_device", lambda: device)
        shipped = tables.read(local.shipped_path("NVIDIA H200")).header
        header = dataclasses.replace(shipped, **{"device_kind": device_kind} | versions)
        monkeypatch.setattr(local, "header_here", lambda: header)
        return measured

    return stand_in


def test_a_cpu_has_nothing_to_predict():
    assert local_performance() == (None, ())


def test_a_shipped_device_needs_no_roofline_and_predicts_other_rows(machine):
    measured = machine("NVIDIA H200")
    performance, notes = local_performance()
    assert not notes and not measured
    times = performance.estimates(SPEC).entry.times["training"]
    assert times[BF16.name] > 0 and performance.estimates(SPEC).spreads


def test_a_patch_version_keeps_the_table_with_a_note(machine):
    machine("NVIDIA H200", jax="0.11.9", jaxlib="0.11.9")
    performance, notes = local_performance()
    assert performance.table.sites and "0.11.9" in notes[0]
    machine("NVIDIA H200", jax="0.12.0")
    performance, notes = local_performance()
    assert not performance.table.sites and "ignored" in notes[0]


def test_another_gpu_is_predicted_by_its_roofline_measured_once(machine):
    measured = machine("NVIDIA L40S", "8.9")
    for _ in range(2):
        performance, notes = local_performance()
    assert len(measured) == 1 and "No dispatch table for NVIDIA L40S" in notes[0]
    times = performance.estimates(SPEC).entry.times["training"]
    assert BF16.name in times and not any("pallas" in name for name in times)
    h200 = fitted_table("NVIDIA H200")
    assert h200.roofline != ROOFLINE


def test_a_gpu_without_fp8_is_left_to_its_modules(machine):
    machine("NVIDIA A100", "8.0")
    performance, notes = local_performance()
    assert performance is None and "8.9" in notes[0]


def test_the_users_measurements_go_before_predictions(machine):
    machine("NVIDIA H200")
    entry = Entry({"training": {BF16.name: 3.5}})
    tables.add(cache_path(), Table(local.header_here(), {SPEC: entry}))
    estimates = local_performance().performance.estimates(SPEC)
    assert estimates.entry.times["training"][BF16.name] == 3.5
    assert estimates.spread("training", BF16) is None


@pytest.mark.parametrize("device", [("NVIDIA H200", "9.0"), ("NVIDIA L40S", "8.9")])
def test_a_damaged_cache_is_removed_with_a_note(machine, device):
    machine(*device)
    cache_path().write_text("{")
    performance, notes = local_performance()
    assert performance.estimates(SPEC).entry.times and "removed" in notes[0]
    assert "removed" not in " ".join(local_performance().notes)


def test_measurements_with_other_kernels_have_another_file(machine):
    machine("NVIDIA H200")
    first = cache_path()
    machine("NVIDIA H200", kernels="0" * 16)
    assert cache_path() != first and cache_path().parent == first.parent


def test_the_random_sites_are_of_the_shipped_device():
    for path in sorted(local._FITTED.glob("*.json")):
        header: Header = tables.read(path).header
        assert local.shipped_path(header.device_kind).stem == path.stem
