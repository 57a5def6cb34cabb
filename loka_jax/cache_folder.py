"""The user's cache folder: what can be made again, kept from run to run."""

import atexit
import functools
import os
import pathlib
import shutil
import stat
import tempfile


def cache_folder(name: str) -> pathlib.Path:
    """Returns a folder that belongs to the user, or a temporary one if none can be.

    It is `loka_jax/NAME` under `XDG_CACHE_HOME`, or under `~/.cache`. The temporary
    one is the same for the whole process, and removed when that ends.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = pathlib.Path(base).expanduser() / "loka_jax" / name
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(root)
        belongs_to_user = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if belongs_to_user and os.access(root, os.W_OK):
            root.chmod(0o700)
            return root
    except OSError:
        pass  # no home, no space, no permission: a temporary folder does as well
    return _temporary(name)


@functools.cache
def _temporary(name: str) -> pathlib.Path:
    temporary = tempfile.mkdtemp(prefix=f"loka_jax-{name}-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return pathlib.Path(temporary)
