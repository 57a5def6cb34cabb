"""Who may read what was written: modes of files and folders, under a known umask."""

import contextlib
import os
import stat


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder):
    """Returns the permissions of a folder and of all that is in it."""
    paths = [folder, *folder.rglob("*")]
    return {stat.S_IMODE(path.stat().st_mode) for path in paths}
