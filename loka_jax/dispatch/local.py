"""What is known of this machine's speed: shipped tables, the user's, predictions.

table   the shipped measurements of this kind of device, then those in the cache
fit     all shipped measurements of the device; of an H200 for another device, which
        is then described by its own roofline, measured once and kept in the cache
"""

import functools
import hashlib
import json
import os
import pathlib
import re
from typing import NamedTuple

import jax

from loka_jax.cache_folder import cache_folder
from loka_jax.commands import as_commands
from loka_jax.dispatch import table as tables
from loka_jax.dispatch.candidates import why_no_fp8
from loka_jax.dispatch.header import header_here
from loka_jax.dispatch.performance import PerformanceModel
from loka_jax.dispatch.table import Table
from loka_jax.measure.roofline import measure_roofline
from loka_jax.ops.device import local_device

_SHIPPED = pathlib.Path(tables.__file__).parent / "tables"
_FITTED = _SHIPPED / "random_sites"  # times at shapes that nobody chose
_FITTED_DEVICE = "NVIDIA H200"  # whose times stand for those of devices without any


class Local(NamedTuple):
    """What is known here, nothing without a GPU with FP8; and notes for the user."""

    performance: PerformanceModel | None
    notes: tuple[str, ...] = ()


def local_performance() -> Local:
    """Returns what is known of this machine; measures its roofline at the first call.

    Shipped measurements that do not hold here are left out with a note.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        return Local(None)
    if (reason := why_no_fp8(local_device())) is not None:
        return Local(None, (f"{device.device_kind} runs no FP8: {reason}.",))
    shipped, notes = _shipped(device.device_kind)
    cached, more = _cached()
    table = cached if shipped is None else shipped.merged(cached)
    fitted = fitted_table(device.device_kind)
    notes = (*notes, *more)
    if fitted.header.device_kind != device.device_kind:
        missing = "No dispatch table" if shipped is None else "No random sites"
        notes += (
            f"{missing} for {device.device_kind}: times are predicted from those of an "
            f"{_FITTED_DEVICE} and this device's roofline; those that a plan relies on "
            "are measured before they run.",
        )
    roofline = table.roofline
    if roofline is None:
        roofline = measure_roofline()
        tables.add(cache_path(), Table(header_here(), {}, roofline))
    device = local_device()
    model = PerformanceModel.of(table, roofline=roofline, fitted=fitted, device=device)
    return Local(model, notes)


def performance_of(path: str | os.PathLike) -> PerformanceModel:
    """Returns the measurements of a table; times that it lacks are predicted.

    Raises:
        ValueError: if it is no table, or does not hold here.
    """
    table = tables.read(pathlib.Path(path))
    reason = table.header.why_not(header_here())
    if reason is not None:
        raise ValueError(
            f"{path} does not hold here, because {reason}: measure a table with "
            f"{as_commands('experiments/tune.py')}, or plan without this one."
        )
    here = local_performance().performance
    if here is None:
        return PerformanceModel.of(table, device=local_device())
    return here.with_table(table)


def cache_path() -> pathlib.Path:
    """Returns the file of the user's measurements with these versions and kernels."""
    header = header_here()
    digest = hashlib.sha256(json.dumps(vars(header)).encode()).hexdigest()[:12]
    return cache_folder("dispatch") / f"{_slug(header.device_kind)}-{digest}.json"


def shipped_path(device_kind: str) -> pathlib.Path:
    """Returns the path of the shipped table of a kind of device, if there is one."""
    return _SHIPPED / f"{_slug(device_kind)}.json"


@functools.cache
def fitted_table(device_kind: str) -> Table:
    """Returns the shipped measurements that predictions are fitted on.

    Those of this kind of device if its random sites were measured, else of an H200.
    They hold for predictions even if versions or kernels have changed a little since.
    """
    random_path = _FITTED / f"{_slug(device_kind)}.json"
    kind = device_kind if random_path.is_file() else _FITTED_DEVICE
    table = tables.read(shipped_path(kind))
    random = tables.read(_FITTED / f"{_slug(kind)}.json")
    return Table(table.header, random.sites | table.sites, table.roofline)


def _shipped(device_kind: str) -> tuple[Table | None, tuple[str, ...]]:
    path = shipped_path(device_kind)
    if not path.is_file():
        return None, ()
    table, here, notes = tables.read(path), header_here(), ()
    reason = table.header.why_not(here)
    if reason is not None:
        return None, (f"The shipped dispatch table is ignored, because {reason}.",)
    if patches := table.header.patches(here):
        notes = (
            f"The shipped dispatch table was measured with {'; '.join(patches)}: patch "
            "versions, so its times are taken to hold.",
        )
    return Table(here, table.sites, table.roofline), notes


def _cached() -> tuple[Table, tuple[str, ...]]:
    """Returns the user's measurements; a damaged file is removed, as a cache can be."""
    path, header = cache_path(), header_here()
    if not path.exists():
        return Table(header), ()
    try:
        return tables.read(path), ()
    except ValueError as error:
        path.unlink(missing_ok=True)
        return Table(header), (f"Earlier measurements were removed: {error}",)


def _slug(device_kind: str) -> str:
    return re.sub(r"\W+", "_", device_kind.lower())
