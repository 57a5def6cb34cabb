"""How the dense gradients of a step travel between GPUs: the fastest way, measured.

Casts, and the passes around two collectives in place of one, cost more than they save
below some size, which depends on the GPUs, their links and their number. So `auto`
looks up what `experiments/bench/collectives.py` measured on such a host, and rounds
gradients only for a gain. On a host that was not measured it stays with float32.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from loka_jax import jsonfile, triton
from loka_jax.ops.collectives import Wire

Option = Literal["auto", "f32", "bf16", "int8"]
SHIPPED = pathlib.Path(__file__).with_suffix(".json")
# Of the time in float32: what rounding has to save.
LEAST_GAIN = 0.1
_MIB = 2**20
_MEASURE = f"python experiments/bench/collectives.py --table {SHIPPED.name}"


class GradientSum(NamedTuple):
    """How the dense gradients of a run are summed over its devices.

    Attributes:
        num_bytes: of all of them in float32.
    """

    wire: Wire
    reason: str
    num_bytes: int

    @property
    def note(self) -> str:
        """A sentence for the user."""
        size = f"{self.num_bytes / _MIB:.3g} MiB"
        return f"Dense gradients, {size}, are summed in {self.wire}: {self.reason}."


def choose_sum(option: Option, params: Any, devices: int, hosts: int) -> GradientSum:
    """Returns how the gradients of some parameters are summed over devices."""
    num_bytes = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    if option != "auto":
        return GradientSum(option, "as asked", num_bytes)
    if devices == 1:
        return GradientSum("f32", "on one device nothing travels", num_bytes)
    # What was measured was measured in one host; links between hosts are others.
    device = jax.devices()[0].device_kind + (f" of {hosts} hosts" if hosts > 1 else "")
    measured = read().get((device, devices))
    if measured is None:
        reason = f"not measured on {devices} x {device}: {_MEASURE} does it"
        return GradientSum("f32", reason, num_bytes)
    int8 = "int8 triton" if triton.why_not_here() is None else "int8 xla"
    forms: dict[Wire, str] = {"f32": "f32", "bf16": "bf16", "int8": int8}
    us: dict[Wire, float] = {
        wire: time_at(measured[form], num_bytes)
        for wire, form in forms.items()
        if form in measured
    }
    wire = min(us, key=lambda name: us[name])
    times = ", ".join(f"{name} {time:.0f}" for name, time in us.items())
    reason = f"sums of {num_bytes / _MIB:.1f} MiB take {times} us"
    if us[wire] > (1 - LEAST_GAIN) * us["f32"]:
        wire, reason = "f32", f"{reason}: rounding must save {LEAST_GAIN:.0%}"
    return GradientSum(wire, reason, num_bytes)


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


def read(
    path: pathlib.Path = SHIPPED,
) -> dict[tuple[str, int], dict[str, dict[int, float]]]:
    """Returns what was measured, by kind and number of the GPUs of a host.

    By form ("f32", "bf16", "int8 xla", "int8 triton") they are the microseconds of a
    sum by the bytes of a device's float32 gradients.
    """
    return {
        (host["device"], host["devices"]): {
            form: {int(size): time for size, time in times.items()}
            for form, times in host["us"].items()
        }
        for host in jsonfile.as_dict(jsonfile.read(path))["hosts"]
    }


def add(path: pathlib.Path, host: dict[str, Any]) -> None:
    """Adds a host to a table, new or not, in place of the same device and number.

    Args:
        host: its `device`, `devices`, `us`, and the `source` of these times.
    """
    key = host["device"], host["devices"]
    old = jsonfile.as_dict(jsonfile.read(path))["hosts"] if path.exists() else []
    kept = [one for one in old if (one["device"], one["devices"]) != key]
    jsonfile.write_text(path, jsonfile.dumps({"hosts": [*kept, host]}, indent=1) + "\n")
