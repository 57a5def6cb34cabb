"""Named training configurations: functions that return frozen dataclasses.

`get_config("fp8_dlrm")` calls the function of that name, which states precision, model
and size.
"""

from experiments.configs import generated, histories, tables, wide
from experiments.configs.registry import (
    descriptions,
    find_config,
    get_config,
    has_settings_by_data,
    names,
    with_model,
)

__all__ = [
    "descriptions",
    "find_config",
    "generated",
    "get_config",
    "has_settings_by_data",
    "histories",
    "names",
    "tables",
    "wide",
    "with_model",
]
