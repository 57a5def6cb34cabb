"""Named training configurations: functions that return frozen dataclasses.

`get_config("fp8_dlrm")` calls the function of that name. A name states precision, model
and size; the `_tiny` variants, for tests, train on a CPU in seconds.
"""

from experiments.configs import generated, tables
from experiments.configs.registry import get_config, names

__all__ = ["generated", "get_config", "names", "tables"]
