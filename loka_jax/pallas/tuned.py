"""The fastest tuning configs on an H200, by kernel, problem and rows.

`experiments/bench/tune_kernels.py` writes the table. Other Hopper devices use the same
configs: they differ in memory, not in what fits.
"""

import functools
import importlib.resources
import json
import math
from typing import Any

_TABLE = "tuned_h200.json"


def lookup(kernel: str, key: str, m: int) -> dict[str, Any] | None:
    """Returns the config measured for the number of rows nearest to `m`, or None."""
    config_by_rows = _load().get(kernel, {}).get(key)
    if not config_by_rows:
        return None
    nearest = min(config_by_rows, key=lambda rows: abs(math.log(int(rows) / m)))
    return config_by_rows[nearest]


@functools.cache
def _load() -> dict[str, Any]:
    file = importlib.resources.files("loka_jax.pallas").joinpath(_TABLE)
    return json.loads(file.read_text())["configs"]
