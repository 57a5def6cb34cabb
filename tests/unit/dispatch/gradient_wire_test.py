"""How gradients travel: by times of such a host, else in float32, with the reason."""

import pytest

from loka_jax.dispatch import gradient_wire
from loka_jax.dispatch.gradient_wire import Host, choose_wire, time_at

MIB = 2**20
US = {
    "f32": {MIB: 100.0, 64 * MIB: 400.0, 256 * MIB: 1400.0},
    "bf16": {MIB: 120.0, 64 * MIB: 380.0, 256 * MIB: 1000.0},
    "int8 xla": {MIB: 200.0, 64 * MIB: 390.0, 256 * MIB: 900.0},
    "int8 triton": {MIB: 180.0, 64 * MIB: 250.0, 256 * MIB: 600.0},
}
HOSTS = [Host("some GPU", 2, {"f32": {MIB: 1.0}}), Host("some GPU", 4, US)]


def chosen(option="auto", mib=64, devices=4, device="some GPU", has_kernels=True):
    return choose_wire(
        option,
        round(mib * MIB),
        device=device,
        devices=devices,
        hosts=HOSTS,
        has_kernels=has_kernels,
    )


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


def test_the_reason_has_the_times():
    assert chosen(mib=160) == (
        "int8",
        "sums of 160.0 MiB take f32 900, bf16 690, int8 425 us",
    )
    assert chosen(mib=64, has_kernels=False).reason == (
        "sums of 64.0 MiB take f32 400, bf16 380, int8 390 us: rounding must save 10%"
    )


def test_what_was_asked_for_is_taken():
    assert chosen("bf16", mib=0.1) == ("bf16", "as asked")
    assert chosen("int8", devices=8) == ("int8", "as asked")


def test_unknown_hosts_stay_with_float32_and_say_so():
    assert chosen(devices=1).wire == "f32"
    for unknown in ({"devices": 8}, {"device": "another GPU"}):
        wire, reason = chosen(**unknown)
        assert wire == "f32" and reason.startswith("not measured on")
        assert "experiments/bench/collectives.py --table" in reason


def test_times_lie_on_lines_between_measured_sizes():
    us = {100: 10.0, 200: 30.0, 400: 40.0}
    sizes = (1, 100, 150, 200, 300, 400, 800)
    assert [time_at(us, n) for n in sizes] == [10, 10, 20, 30, 35, 40, 60]


def test_a_table_keeps_one_entry_a_host(tmp_path):
    path = tmp_path / "table.json"
    for time in (5, 7):
        host = {"device": "g", "devices": 2, "source": "x", "us": {"f32": {"1": time}}}
        gradient_wire.add(path, host)
    gradient_wire.add(path, host | {"devices": 4})
    assert gradient_wire.read(path) == [
        Host("g", 2, {"f32": {1: 7.0}}),
        Host("g", 4, {"f32": {1: 7.0}}),
    ]


@pytest.mark.parametrize("text", ["{}", '{"hosts": [{"device": "g"}]}', '{"hosts": 3}'])
def test_other_files_are_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no table of sums over GPUs"):
        gradient_wire.read(path)


def test_the_shipped_table_can_be_read():
    assert isinstance(gradient_wire.read(), list)
