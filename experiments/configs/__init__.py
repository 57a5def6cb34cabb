"""Named training configurations: functions that return frozen dataclasses.

`get_config("fp8_dlrm")` calls the function of that name. A name says precision, model
and size; `_tiny` variants train on a CPU in seconds and are what the tests run.
"""

from experiments.configs import generated, tables
from experiments.configs.registry import get_config, names

__all__ = ["generated", "get_config", "names", "tables"]
