"""Named training configurations: functions that return frozen dataclasses.

`get_config("fp8_dlrm")` calls the function of that name. A name states precision, model
and size.
"""

from experiments.configs import generated, tables, wide
from experiments.configs.registry import all_names, get_config, names
from experiments.configs.source import find_config

__all__ = [
    "all_names",
    "find_config",
    "generated",
    "get_config",
    "names",
    "tables",
    "wide",
]
