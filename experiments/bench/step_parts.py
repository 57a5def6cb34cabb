"""The parts of a training step, to which the device's kernel time is assigned.

By the scopes in the names that a program's instructions carry: a kernel that does work
of several parts counts for the one of its result.
"""

import re

from experiments.bench.steps import Chain
from loka_jax.measure.timing import profile_ops

# By the scopes in an instruction's name; the first that fits.
_PARTS = {
    "route": re.compile(r"/route/"),
    "lookup": re.compile(r"/lookup/"),
    "rows update": re.compile(r"/update_rows/"),
    "dense update": re.compile(r"/optimizer/"),
    "merge of devices": re.compile(r"/merge/"),
    "metrics": re.compile(r"/metrics/"),
    "interaction, backward": re.compile(r"transpose\(.*interaction"),
    "interaction, forward": re.compile(r"interaction"),
    "dense, backward": re.compile(r"transpose\("),
    "dense, forward": re.compile(r"jvp\("),
}
_OTHER = "other"


def kernels_by_part(text: str, chain: Chain, devices: int = 1) -> dict[str, float]:
    """Returns the microseconds of a step's kernels on a device, by part.

    Args:
        text: of the compiled step, which must have no command buffers.
        chain: queues steps of that program, and nothing else.
        devices: on which it runs, of this process.
    """
    scopes = _scopes(text)
    parts = dict.fromkeys((*_PARTS, _OTHER), 0.0)
    for op, time_us in profile_ops(chain).items():
        parts[_part(scopes.get(op, ""))] += time_us / devices
    return parts


def _scopes(text: str) -> dict[str, str]:
    """Returns the `op_name` of each instruction of a compiled program."""
    pattern = r"^\s*(?:ROOT )?%?([\w.\-]+) = .*op_name=\"([^\"]*)\""
    return dict(re.findall(pattern, text, flags=re.MULTILINE))


def _part(name: str) -> str:
    return next((part for part, scope in _PARTS.items() if scope.search(name)), _OTHER)
