"""Checks families of kernels before they run for the first time on a machine.

What was found is kept in the user's cache, in a file for each device, versions, kernels
and checks. Processes that start at once check one after another, the later ones by
reading. Where no kernel runs nothing is checked.
"""

import hashlib
import json
import pathlib

import jax

from loka_jax import jsonfile
from loka_jax.cache_folder import cache_folder
from loka_jax.dispatch import sources
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.header import header_here
from loka_jax.measure import families
from loka_jax.measure.checking import NO_MEMORY

# All that kernels, what launches them, and their references and checks are made of.
_CHECKED = ("*.py", "measure/*", "ops/*", "optim/*", "pallas/*", "triton/*", "xla/*")
_CAPABILITY = "9.0"  # of the GPUs that kernels are compiled for


def why_wrong(family: str) -> str | None:
    """Returns what is wrong with a family's kernels on this device, or None.

    Raises:
        ValueError: if there is no such family.
    """
    device = jax.local_devices()[0]
    if getattr(device, "compute_capability", None) != _CAPABILITY:
        return None
    path = verdicts_path()
    with tables.locked(path):
        verdicts = _read(path)
        if family not in verdicts:
            verdicts[family] = families.why_wrong(family)
            # Another run may leave more memory.
            if verdicts[family] != NO_MEMORY:
                jsonfile.write(path, verdicts)
    return verdicts[family]


def verdicts_path() -> pathlib.Path:
    """Returns the file of what was found with this device, versions and sources."""
    about = vars(header_here()) | {"checks": sources.digest(_CHECKED)}
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
    return cache_folder("kernels") / f"{digest}.json"


def _read(path: pathlib.Path) -> dict[str, str | None]:
    """Returns the verdicts in a file; none of one that is missing or damaged."""
    try:
        return jsonfile.typed(jsonfile.read(path), dict[str, str | None])
    except (OSError, ValueError):
        return {}
