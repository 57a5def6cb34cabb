"""How much memory and disk there is, so that what does not fit is told beforehand."""

import os
import pathlib
import shutil

# What a container may use, in the two versions of Linux's control groups.
_CONTAINER_LIMITS = (
    pathlib.Path("/sys/fs/cgroup/memory.max"),
    pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def memory_bytes() -> int:
    """Returns the memory of the machine, or of the container if that has less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CONTAINER_LIMITS:
        try:
            memory = min(memory, int(path.read_text()))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return memory


def free_bytes(folder: pathlib.Path) -> int:
    """Returns the free space of the disk on which the folder lies."""
    return shutil.disk_usage(folder).free


def check_disk(folder: pathlib.Path, needed: int, rows: str) -> None:
    """Raises ValueError if the folder's disk has fewer than `needed` bytes free."""
    if needed > (free := free_bytes(folder)):
        # In bytes, as rounded amounts may look the same.
        raise ValueError(
            f"The disk of {folder.parent} has {free:,} bytes free, and {rows} take "
            f"{needed:,}: make room, or choose another folder with --out or "
            "--data.cache."
        )
