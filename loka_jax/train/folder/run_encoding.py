"""The encoding that a run keeps in its workdir, for all that comes after training."""

import pathlib
import shutil

from loka_jax.data import Splits
from loka_jax.data.saved_encoding import open_encoding, save_encoding
from loka_jax.data.shards import ShardFolder
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.folder.record import ENCODING


def read(saved: Saved, workdir: pathlib.Path) -> ShardFolder | None:
    """Returns the encoding that a checkpoint names; None for generated data.

    Raises:
        ValueError: if it is missing, damaged, or another one.
    """
    digest = saved.meta.get("encoding")
    return None if digest is None else open_encoding(workdir / ENCODING, digest)


def keep(splits: Splits, workdir: pathlib.Path):
    """Writes the encoding of a run's data to its workdir, unless it is there.

    Raises:
        ValueError: if it cannot be written.
    """
    if splits.folder is None or splits.encoding_digest is None:
        return
    path = workdir / ENCODING
    if path.exists():
        try:
            open_encoding(path, splits.encoding_digest)
            return
        except ValueError:  # left by a start that saved no checkpoint
            shutil.rmtree(path)
    save_encoding(splits.folder, path)
