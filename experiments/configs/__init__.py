"""Named training configurations: functions that return frozen dataclasses.

`get_config("fp8_dlrm")` calls the function of that name, which states precision, model
and size.
"""

from experiments.configs import generated, tables, wide
from experiments.configs.registry import (
    all_names,
    descriptions,
    find_config,
    get_config,
    names,
)

__all__ = [
    "all_names",
    "descriptions",
    "find_config",
    "generated",
    "get_config",
    "names",
    "tables",
    "wide",
]
