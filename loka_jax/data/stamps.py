"""Notices that a file is replaced or written to while it is read."""

import os
import pathlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Stamp(NamedTuple):
    """What changes whenever a file's contents do.

    Attributes:
        size: in bytes.
        modified_ns: the time of the last writing, which programs can set back.
        changed_ns: the time of the last writing or renaming, which they cannot.
    """

    # Not the inode: some network disks renumber a file that is not open.
    size: int
    modified_ns: int
    changed_ns: int


def stamp_of(path: pathlib.Path) -> Stamp:
    """Returns the file's stamp.

    Raises:
        ValueError: if it is gone or not a regular file.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): mend that, or correct "
            "--data.path."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{path} is a pipe or a device, and data are read twice: write them to a "
            "file."
        )
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def unchanged(stamps: dict[pathlib.Path, Stamp]) -> Iterator[None]:
    """Checks the files after the block, also when it fails with a ValueError.

    Raises:
        ValueError: with the first file that changed, and what to do.
    """
    try:
        yield
    except ValueError:  # a change explains what looks like damage
        check_unchanged(stamps)
        raise
    check_unchanged(stamps)


def check_unchanged(stamps: dict[pathlib.Path, Stamp]) -> None:
    """Raises ValueError with the first file whose stamp is not the given one."""
    for path, stamp in stamps.items():
        if stamp_of(path) != stamp:
            raise ValueError(
                f"{path} changed while it was read: wait until it is complete, then "
                "start again."
            )
