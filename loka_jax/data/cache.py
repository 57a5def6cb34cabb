"""A cache of converted shards, in the user's private cache folder by default."""

import atexit
import hashlib
import json
import os
import pathlib
import shutil
import stat
import tempfile

from loka_jax.data import convert, shards
from loka_jax.data.config import DataConfig
from loka_jax.data.files import Sources
from loka_jax.data.stamps import stamp_of


def cached_shards(config: DataConfig, sources: Sources) -> pathlib.Path:
    """Returns the cached folder of the sources' shards, converting them if needed.

    The folder's name is a digest of the files' paths and stamps and of the options, so
    a changed file or option gets a new folder. If two runs convert at the same time,
    the first to finish wins.
    """
    target = _root(config) / _digest(config, sources)
    if shards.is_shard_folder(target):
        try:
            shards.open_shards(target)
            return target
        except ValueError:  # damaged; a cached folder can be rebuilt
            shutil.rmtree(target)
    try:
        convert.convert(config, sources, target)
    except ValueError:
        if not shards.is_shard_folder(target):  # no other run finished it meanwhile
            raise
    return target


def _digest(config: DataConfig, sources: Sources) -> str:
    files = [
        [split, str(path.resolve()), *stamp_of(path)]
        for split, paths in sources._asdict().items()
        for path in paths
    ]
    settings = convert.settings_of(config)
    key = [shards.VERSION, config.kind, settings, files]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def _root(config: DataConfig) -> pathlib.Path:
    """Returns the cache folder, or a temporary one if the user's cannot be used."""
    if config.cache is not None:
        return pathlib.Path(config.cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = pathlib.Path(base).expanduser() / "loka_jax" / "data"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(root)
        belongs_to_user = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if belongs_to_user and os.access(root, os.W_OK):
            root.chmod(0o700)
            return root
    except OSError:
        pass
    temporary = tempfile.mkdtemp(prefix="loka_jax-data-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return pathlib.Path(temporary)
