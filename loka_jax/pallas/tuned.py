"""The settings that were fastest on an H200, by kernel, problem and rows.

`experiments/bench/tune_kernels.py` writes the table. Other Hopper devices take the same
settings: they differ in memory, not in what fits.
"""

import functools
import importlib.resources
import json
import math
from typing import Any

_TABLE = "tuned_h200.json"


def lookup(kernel: str, key: str, m: int) -> dict[str, Any] | None:
    """Returns the settings measured for the number of rows nearest to `m`, or None.

    Args:
        kernel: name of the kernel's module.
        key: what tells its problems apart, without their rows.
        m: rows; the nearest by ratio is taken.
    """
    measured = _load().get(kernel, {}).get(key)
    if not measured:
        return None
    return measured[min(measured, key=lambda rows: abs(math.log(int(rows) / m)))]


@functools.cache
def _load() -> dict[str, Any]:
    file = importlib.resources.files("loka_jax.pallas").joinpath(_TABLE)
    return json.loads(file.read_text())["settings"]
