"""A cache of converted shards, in the user's private cache folder by default."""

import hashlib
import json
import pathlib
import shutil

from loka_jax.cache_folder import cache_folder
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
    """Returns the folder of the shards."""
    if config.cache is not None:
        return pathlib.Path(config.cache).expanduser()
    return cache_folder("data")
