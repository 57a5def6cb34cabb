"""How the dense gradients of a step travel between GPUs: the fastest way, measured.

Casts, and the passes around two collectives in place of one, cost more than they save
below some size, which depends on the GPUs, their links and their number. So `auto`
looks up what `experiments/bench/collectives.py` measured on such a host, and rounds
gradients only for a gain. On a host that was not measured it stays with float32.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from loka_jax import jsonfile
from loka_jax.ops.collectives import Wire

Option = Literal["auto", "f32", "bf16", "int8"]
SHIPPED = pathlib.Path(__file__).with_suffix(".json")
# Of the time in float32: what rounding has to save.
LEAST_GAIN = 0.1
_MIB = 2**20
_MEASURE = "python experiments/bench/collectives.py --table"


class Host(NamedTuple):
    """What was measured on GPUs of one host.

    Attributes:
        device: their kind, as JAX names it.
        devices: their number.
        us: by form ("f32", "bf16", "int8 xla", "int8 triton") the microseconds of a sum
            by the bytes of a device's float32 gradients.
    """

    device: str
    devices: int
    us: Mapping[str, Mapping[int, float]]


class WireChoice(NamedTuple):
    """How gradients travel, and a sentence why."""

    wire: Wire
    reason: str


def choose_wire(
    option: Option,
    num_bytes: int,
    *,
    device: str,
    devices: int,
    hosts: Sequence[Host],
    has_kernels: bool,
) -> WireChoice:
    """Returns how gradients travel.

    Args:
        num_bytes: of all dense gradients in float32.
        has_kernels: whether Triton's kernels run here; without them int8 takes XLA's.
    """
    if option != "auto":
        return WireChoice(option, "as asked")
    if devices == 1:
        return WireChoice("f32", "on one device nothing travels")
    found = [host.us for host in hosts if host[:2] == (device, devices)]
    if not found:
        reason = (
            f"not measured on {devices} x {device}: {_MEASURE} {SHIPPED.name} does it"
        )
        return WireChoice("f32", reason)
    forms: dict[Wire, str] = {
        "f32": "f32",
        "bf16": "bf16",
        "int8": "int8 triton" if has_kernels else "int8 xla",
    }
    us: dict[Wire, float] = {
        wire: time_at(found[-1][form], num_bytes)
        for wire, form in forms.items()
        if form in found[-1]
    }
    wire = min(us, key=lambda name: us[name])
    times = ", ".join(f"{name} {time:.0f}" for name, time in us.items())
    reason = f"sums of {num_bytes / _MIB:.1f} MiB take {times} us"
    if us[wire] > (1 - LEAST_GAIN) * us["f32"]:
        return WireChoice("f32", f"{reason}: rounding must save {LEAST_GAIN:.0%}")
    return WireChoice(wire, reason)


def time_at(us: Mapping[int, float], num_bytes: int) -> float:
    """Returns the time at a size, on straight lines through those that were measured.

    Below the smallest size it is that of the smallest; beyond the largest the last line
    goes on.
    """
    sizes = sorted(us)
    times = [us[size] for size in sizes]
    if num_bytes <= sizes[-1] or len(sizes) == 1:
        return float(np.interp(num_bytes, sizes, times))
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    return times[-1] + slope * (num_bytes - sizes[-1])


def read(path: pathlib.Path = SHIPPED) -> list[Host]:
    """Returns the hosts of a table.

    Raises:
        ValueError: if it is not one.
    """
    table = jsonfile.as_dict(jsonfile.read(path))
    try:
        return [_host(host) for host in table["hosts"]]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is no table of sums over GPUs ({error!r}): write a new one with "
            f"{_MEASURE} FILE."
        ) from None


def _host(host: Mapping[str, Any]) -> Host:
    us = {
        form: {int(size): float(time) for size, time in times.items()}
        for form, times in host["us"].items()
    }
    if not us["f32"] or not all(us.values()):
        raise ValueError("there is a form without times")
    return Host(str(host["device"]), int(host["devices"]), us)


def add(path: pathlib.Path, host: dict[str, Any]) -> None:
    """Adds a host to a table, new or not, in place of the same device and number.

    Args:
        host: as `Host`, in JSON's types, with the `source` of its times.
    """
    key = _host(host)[:2]
    old = jsonfile.as_dict(jsonfile.read(path))["hosts"] if path.exists() else []
    kept = [one for one in old if (one["device"], one["devices"]) != key]
    jsonfile.write_text(path, jsonfile.dumps({"hosts": [*kept, host]}, indent=1) + "\n")
