"""What is known of a machine: which table, which cache, which notes."""

import dataclasses
import types

import pytest

from loka_jax.dispatch import local
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import Header
from loka_jax.dispatch.local import cache_path, local_performance
from loka_jax.dispatch.table import Entry, Table
from loka_jax.ops.device import Device
from loka_jax.site import BF16, SiteSpec
from tests.support.dispatch import COPIER, copies, copy_sites, copy_us
from tests.support.stand_ins import ROOFLINE

SPEC = SiteSpec(5000, 448, 256, "layer", "swish")
H200 = "NVIDIA H200"
SHIPPED = Header(H200, "0.11.2", "0.11.2", "0.3.1 3.9.0", "abc")
SITES = copy_sites()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Returns a function that stands a GPU in; its roofline is measured once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shipped, random = tmp_path / "shipped", tmp_path / "shipped/random"
    random.mkdir(parents=True)
    monkeypatch.setattr(local, "_SHIPPED", shipped)
    monkeypatch.setattr(local, "_FITTED", random)
    tables.write(shipped / "nvidia_h200.json", copies(SITES[:2], header=SHIPPED))
    other = copies(SITES[1:], lambda spec: 2 * copy_us(spec), SHIPPED)
    tables.write(random / "nvidia_h200.json", other)
    measured = []
    monkeypatch.setattr(
        local, "measure_roofline", lambda: measured.append(1) or ROOFLINE
    )

    def stand_in(device_kind, compute_capability="9.0", **versions):
        gpu = {"device_kind": device_kind, "compute_capability": compute_capability}
        gpu = types.SimpleNamespace(platform="gpu", **gpu)
        device = Device(compute_capability=compute_capability)
        header = dataclasses.replace(SHIPPED, device_kind=device_kind, **versions)
        monkeypatch.setattr(local.jax, "devices", lambda: [gpu])
        monkeypatch.setattr(local, "local_device", lambda: device)
        monkeypatch.setattr(local, "header_here", lambda: header)
        return measured

    local.fitted_table.cache_clear()
    yield stand_in
    local.fitted_table.cache_clear()


def _training(performance, spec=SPEC):
    return performance.estimates(spec).entry.times["training"]


def test_a_shipped_device_needs_no_roofline_and_predicts_other_rows(machine):
    measured = machine(H200)
    performance, notes = local_performance()
    assert not notes and not measured
    assert performance.table.sites.keys() == set(SITES[:2])
    assert performance.roofline == COPIER
    assert performance.estimates(SPEC).spread("training", BF16) > 0
    # Of a site that was measured twice, the one that is no random site counts.
    fitted = local.fitted_table(H200).sites
    assert fitted.keys() == set(SITES)
    assert fitted[SITES[1]].times["training"][BF16.name] == copy_us(SITES[1])


def test_a_patch_version_keeps_the_table_with_a_note(machine):
    machine(H200, jax="0.11.9", jaxlib="0.11.9")
    performance, (note,) = local_performance()
    assert performance.table.sites and "with jax 0.11.2, and here it is 0.11.9" in note
    for versions in ({"jax": "0.12.0"}, {"jaxlib": "0.10.2"}, {"kernels": "abd"}):
        machine(H200, **versions)
        performance, notes = local_performance()
        assert not performance.table.sites and "is ignored, because" in notes[0]


def test_another_gpu_is_predicted_by_its_roofline_measured_once(machine):
    measured = machine("NVIDIA L40S", "8.9")
    for _ in range(2):
        performance, notes = local_performance()
    assert len(measured) == 1 and performance.roofline == ROOFLINE
    assert notes[0].startswith("No dispatch table for NVIDIA L40S: times are predicted")
    times = _training(performance)
    assert BF16.name in times and not any("pallas" in name for name in times)


def test_the_users_measurements_go_first_and_a_damaged_cache_is_removed(machine):
    machine(H200)
    entry = Entry({"training": {BF16.name: 3.5}})
    mine = Table(local.header_here(), {SPEC: entry, SITES[0]: entry})
    tables.add(cache_path(), mine)
    performance = local_performance().performance
    for spec in (SPEC, SITES[0]):
        assert _training(performance, spec)[BF16.name] == 3.5
        assert performance.estimates(spec).spread("training", BF16) is None
    cache_path().write_text("{")
    performance, notes = local_performance()
    assert _training(performance) and "Earlier measurements were removed" in notes[0]
    assert not local_performance().notes
