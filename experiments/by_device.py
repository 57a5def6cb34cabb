"""`--config fp8_dlrm` by device: on a Hopper GPU it has a width at which FP8 pays.

    fp8_dlrm        fp8_dlrm_wide on a Hopper GPU, else the small one
    fp8_dlrm_small  the small one on any device

Likewise `bf16_dlrm`, the baseline.
"""

import sys

from experiments.arguments import asks_for_help

_WIDE = {"fp8_dlrm": "fp8_dlrm_wide", "bf16_dlrm": "bf16_dlrm_wide"}


def named_here(name: str, arguments: list[str]) -> str:
    """Returns the registered configuration that a name stands for on this device.

    Says so on the error output if it is not that of the name itself.

    Args:
        name: the value of `--config`.
        arguments: the command line; one that asks for help is not worth a GPU's start.
    """
    if name not in _WIDE or asks_for_help(arguments) or not _is_on_hopper():
        return name
    wide = _WIDE[name]
    print(
        f"On a Hopper GPU {name} is {wide}: a width at which FP8 is faster than any "
        f"bfloat16. --config {name}_small is the one that a CPU trains.",
        file=sys.stderr,
    )
    return wide


def _is_on_hopper() -> bool:
    from loka_jax.ops.device import HOPPER, local_device
    from loka_jax.train.processes.group import start

    start()  # the processes of a run, before any of them asks for its devices
    try:
        return local_device().compute_capability == HOPPER.compute_capability
    except (RuntimeError, AssertionError):
        return False  # the session says why JAX cannot run
