"""How gradients travel: by times of such a host, else in float32, with the reason."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from loka_jax import triton
from loka_jax.dispatch import gradient_wire
from loka_jax.dispatch.gradient_wire import choose_sum, time_at

MIB = 2**20
US = {
    "f32": {MIB: 100.0, 64 * MIB: 400.0, 256 * MIB: 1400.0},
    "bf16": {MIB: 120.0, 64 * MIB: 380.0, 256 * MIB: 1000.0},
    "int8 xla": {MIB: 200.0, 64 * MIB: 390.0, 256 * MIB: 900.0},
    "int8 triton": {MIB: 180.0, 64 * MIB: 250.0, 256 * MIB: 600.0},
}


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """Returns what is chosen on GPUs of which some hosts were measured."""
    table, read = tmp_path / "table.json", gradient_wire.read
    for devices, us in ((2, {"f32": {MIB: 1.0}}), (4, {}), (4, US)):
        host = {"device": "some GPU", "devices": devices, "source": "here", "us": us}
        gradient_wire.add(table, host)
    monkeypatch.setattr(gradient_wire, "read", lambda: read(table))

    def choose(option="auto", mib=64.0, has_kernels=True, devices=4, **host):
        device = SimpleNamespace(device_kind=host.get("device", "some GPU"))
        monkeypatch.setattr(jax, "devices", lambda: [device])
        monkeypatch.setattr(triton, "why_not_here", lambda: None if has_kernels else "")
        halves = np.zeros((2, round(mib * MIB / 16))), np.zeros(round(mib * MIB / 8))
        return choose_sum(option, halves, devices, host.get("hosts", 1))

    return choose


@pytest.mark.parametrize(
    "mib, has_kernels, wire",
    [
        (0.5, True, "f32"),  # casts cost more than they save
        (64, True, "int8"),
        (64, False, "f32"),  # bf16 is 5 % faster: too little
        (256, True, "int8"),
        (256, False, "int8"),
    ],
)
def test_the_fastest_is_chosen_if_it_gains_enough(chosen, mib, has_kernels, wire):
    found = chosen(mib=mib, has_kernels=has_kernels)
    assert (found.wire, found.num_bytes) == (wire, mib * MIB)
    if mib == 64 and has_kernels:
        assert found.reason == "sums of 64.0 MiB take f32 400, bf16 380, int8 250 us"


def test_what_was_asked_for_is_taken_and_unknown_hosts_stay_with_float32(chosen):
    assert chosen("bf16", mib=0.125) == ("bf16", "as asked", MIB // 8)
    unknown = {"devices": 1}, {"devices": 8}, {"device": "another GPU"}
    assert all(chosen(**one).wire == "f32" for one in unknown)
    found = chosen(hosts=2)  # between hosts times are others
    assert found.wire == "f32" and "4 x some GPU of 2 hosts" in found.reason


def test_times_lie_on_lines_between_measured_sizes():
    us = {100: 10.0, 200: 30.0, 400: 40.0}
    sizes = (1, 100, 150, 200, 300, 400, 800)
    assert [time_at(us, n) for n in sizes] == [10, 10, 20, 30, 35, 40, 60]
