"""Whether there is room on the disk for the checkpoints of a run."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

# Bytes on the disk for a byte of state that does not compress, with something to spare.
_DISK_BYTES = 1.1


@runtime_checkable
class Folder(Protocol):
    """A folder of checkpoints."""

    @property
    def directory(self) -> Path:
        """The folder of the steps."""
        ...

    def copies_to_come(self) -> int:
        """Returns how many checkpoints there will be at most beside those there are."""
        ...


def require_space(folders: Sequence[Folder], state: Any) -> None:
    """Checks, before the first step, that the checkpoints of a run will fit.

    Args:
        folders: all that the run saves to. Those on one file system share its space.
        state: a pytree of arrays or `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: if a file system has less space than the checkpoints that are kept
            and those in progress need beside the ones that are there.
    """
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)]
    by_device: dict[int, list[Folder]] = {}
    for folder in folders:
        by_device.setdefault(folder.directory.stat().st_dev, []).append(folder)
    for together in by_device.values():
        copies = sum(folder.copies_to_come() for folder in together)
        require_copies(together[0].directory, copies, sum(sizes))


def require_copies(directory: Path, copies: int, state_bytes: int) -> None:
    """Raises ValueError if a file system has no space for so many more checkpoints."""
    needed = int(_DISK_BYTES * copies * state_bytes)
    free = shutil.disk_usage(directory).free
    if free < needed:
        folders = (directory, *directory.parents)
        mount = next(folder for folder in folders if folder.is_mount())
        more = "checkpoint" if copies == 1 else "checkpoints"
        raise ValueError(
            f"{directory} needs {needed:,} bytes for {copies} more {more}, and "
            f"{free:,} are free on its file system ({mount}): free "
            f"{needed - free:,} bytes there, lower --loop.keep-checkpoints, or choose "
            "another --workdir."
        )
