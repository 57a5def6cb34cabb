"""A run's folder as the source of a trained model."""

import pathlib
from typing import NamedTuple

from loka_jax.data.shards import ShardFolder
from loka_jax.saved_format import CHECKPOINTS, steps_in
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.config import Config
from loka_jax.train.folder import run_encoding
from loka_jax.train.folder.config_file import from_json
from loka_jax.train.folder.record import BEST, CONFIG, saved_config


class SourceRun(NamedTuple):
    """A run to predict with, or to go on from.

    Attributes:
        workdir: its folder.
        config: its configuration.
        checkpoints: the folder of the checkpoint.
        saved: the checkpoint.
    """

    workdir: pathlib.Path
    config: Config
    checkpoints: Checkpoints
    saved: Saved

    def encoding(self) -> ShardFolder:
        """Returns the folder of its encoding.

        Raises:
            ValueError: if it has none that is whole.
        """
        folder = run_encoding.read(self.saved, self.workdir)
        if folder is None:
            raise ValueError(
                f"{self.workdir} was trained on generated clicks, which have no "
                "vocabulary: train one on files."
            )
        return folder


def open_run(workdir: pathlib.Path, *, best: bool) -> SourceRun:
    """Returns a run at its newest checkpoint.

    Args:
        workdir: the folder of the run.
        best: whether to take the checkpoint of the best evaluation, if there is one.

    Raises:
        ValueError: if the folder holds no run, or none of its checkpoints is whole.
    """
    workdir = workdir.expanduser()
    config = read_config_of(workdir)
    for name in (BEST, CHECKPOINTS) if best else (CHECKPOINTS,):
        path = workdir / name
        if path.is_dir() and steps_in(path):
            checkpoints = Checkpoints(path)
            if (saved := checkpoints.newest()) is not None:
                return SourceRun(workdir, config, checkpoints, saved)
    raise ValueError(
        f"{workdir} has no checkpoint yet: wait for its first one, or train it again."
    )


def read_config_of(workdir: pathlib.Path) -> Config:
    """Returns the configuration of the run in a folder.

    Raises:
        ValueError: if the folder holds none, or that of another version.
    """
    if not (path := workdir.expanduser() / CONFIG).is_file():
        raise ValueError(
            f"{workdir} holds no run ({CONFIG} is missing): name the --workdir of one."
        )
    return from_json(saved_config(workdir.expanduser()), str(path))
