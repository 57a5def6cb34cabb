"""How gradients travel: by times of such a host, else in float32, with the reason."""

import pytest

from loka_jax.dispatch.gradient_wire import Host, choose_wire, time_at

MIB = 2**20
US = {
    "f32": {MIB: 100.0, 64 * MIB: 400.0, 256 * MIB: 1400.0},
    "bf16": {MIB: 120.0, 64 * MIB: 380.0, 256 * MIB: 1000.0},
    "int8 xla": {MIB: 200.0, 64 * MIB: 390.0, 256 * MIB: 900.0},
    "int8 triton": {MIB: 180.0, 64 * MIB: 250.0, 256 * MIB: 600.0},
}
HOSTS = [Host("some GPU", 2, {"f32": {MIB: 1.0}}), Host("some GPU", 4, US)]


def chosen(option="auto", mib=64, **host):
    host = {"device": "some GPU", "devices": 4, "has_kernels": True} | host
    return choose_wire(option, round(mib * MIB), hosts=HOSTS, **host)


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
def test_the_fastest_is_chosen_if_it_gains_enough(mib, has_kernels, wire):
    assert chosen(mib=mib, has_kernels=has_kernels).wire == wire


def test_what_was_asked_for_is_taken_and_unknown_hosts_stay_with_float32():
    assert chosen("bf16", mib=0.1) == ("bf16", "as asked")
    for unknown in ({"devices": 1}, {"devices": 8}, {"device": "another GPU"}):
        assert chosen(**unknown).wire == "f32"


def test_times_lie_on_lines_between_measured_sizes():
    us = {100: 10.0, 200: 30.0, 400: 40.0}
    sizes = (1, 100, 150, 200, 300, 400, 800)
    assert [time_at(us, n) for n in sizes] == [10, 10, 20, 30, 35, 40, 60]
