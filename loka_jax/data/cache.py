"""A cache of converted shards, in the user's private cache folder by default."""

import hashlib
import json
import pathlib
import shutil

from loka_jax import saved_format
from loka_jax.cache_folder import cache_folder
from loka_jax.data import convert, shards
from loka_jax.data.config import DataConfig
from loka_jax.data.files import Sources, left_out
from loka_jax.data.saved_encoding import digest_of, load_encoding
from loka_jax.data.settings import settings_of
from loka_jax.data.shards import ShardFolder
from loka_jax.data.stamps import stamp_of

_READING = 2  # raised where the same files give other rows or ids


def cached_shards(
    config: DataConfig, sources: Sources, base: ShardFolder | None = None
) -> pathlib.Path:
    """Returns the cached folder of the sources' shards, converting them if needed.

    The folder's name is a digest of the files' paths and stamps and of the options, so
    a changed file or option gets a new folder. If two runs convert at the same time,
    the first to finish wins.

    Args:
        config: columns and policies.
        sources: the files of each split.
        base: a folder with the encoding to start from; None to learn one.
    """
    name = _digest(config, sources)
    if base is not None:
        if (same := _with_encoding(_root(config), name, digest_of(base))) is not None:
            return same
        name = f"{name}-{digest_of(base)[:16]}"
    target = _root(config) / name
    if shards.is_shard_folder(target):
        try:
            shards.open_shards(target)
            return target
        except ValueError:  # damaged; a cached folder can be rebuilt
            shutil.rmtree(target)
    encoding = None if base is None else load_encoding(base)
    try:
        convert.convert(config, sources, target, base=encoding)
    except ValueError:
        if not shards.is_shard_folder(target):  # no other run finished it meanwhile
            raise
    return target


def _with_encoding(root: pathlib.Path, name: str, encoding: str) -> pathlib.Path | None:
    """Returns a folder of the same files and options with this encoding, or None."""
    for folder in sorted(root.glob(f"{name}*")):
        try:
            if digest_of(shards.open_shards(folder)) == encoding:
                return folder
        except ValueError:  # damaged, or in another format
            continue
    return None


def _digest(config: DataConfig, sources: Sources) -> str:
    files = [
        [split, str(path.resolve()), *stamp_of(path)]
        for split, paths in sources._asdict().items()
        for path in paths
    ]
    settings = settings_of(config)
    key = [saved_format.SHARDS, _READING, config.kind, settings, files]
    key += left_out(config, sources)  # which the report names
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def _root(config: DataConfig) -> pathlib.Path:
    """Returns the folder of the shards."""
    if config.cache is not None:
        return pathlib.Path(config.cache).expanduser()
    return cache_folder("data")
