"""The memory that a run holds, on the device and on the host."""

import os
import pathlib

import jax

_STATM = pathlib.Path("/proc/self/statm")


def memory_bytes() -> dict[str, int | None]:
    """Returns the largest number of bytes held on the device, and those on the host.

    Returns:
        device_peak_bytes: since the process started; None on a backend that does not
            tell, such as the CPU.
        host_bytes: resident now; None on a system without /proc.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    host = None
    if _STATM.exists():
        host = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"device_peak_bytes": stats.get("peak_bytes_in_use"), "host_bytes": host}
