"""A run's folder as the source of a trained model, and the encoding that it keeps.

The encoding turns rows into the model's inputs, in all that comes after training.
"""

import pathlib
import shutil
from typing import NamedTuple

from loka_jax import jsonfile
from loka_jax.data import Splits
from loka_jax.data.saved_encoding import open_encoding, save_encoding
from loka_jax.data.shards import ShardFolder
from loka_jax.saved_format import CHECKPOINTS, steps_in
from loka_jax.train.calibration import CALIBRATION, Calibration
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.config import Config
from loka_jax.train.folder.config_file import from_json
from loka_jax.train.folder.record import BEST, CONFIG, ENCODING, saved_config


class SourceRun(NamedTuple):
    """A run to predict with, or to go on from, at one of its checkpoints."""

    workdir: pathlib.Path
    config: Config
    checkpoints: Checkpoints
    saved: Saved
    is_resumed: bool = False  # it goes on itself, at this step

    def encoding(self) -> ShardFolder:
        """Returns the folder of its encoding.

        Raises:
            ValueError: if it has none that is whole.
        """
        if (folder := self._encoding()) is None:
            raise ValueError(
                f"{self.workdir} was trained on generated clicks, which have no "
                "vocabulary: train one on files."
            )
        return folder

    def base(self) -> ShardFolder | None:
        """Returns the encoding of a run that starts here; None if it learns its own.

        Raises:
            ValueError: as `encoding`, but for a resumed run on generated clicks.
        """
        return self._encoding() if self.is_resumed else self.encoding()

    def calibration(self) -> Calibration | None:
        """Returns the calibration of its logits; None if it was to have none.

        Raises:
            ValueError: if it was to have one, and has not ended.
        """
        if not self.config.calibrate:
            return None
        path = self.workdir / CALIBRATION
        if not path.exists():
            raise ValueError(
                f"{self.workdir} is to be calibrated at its end, which it has not "
                "reached: go on with --resume."
            )
        return jsonfile.typed(jsonfile.read(path), Calibration)

    def _encoding(self) -> ShardFolder | None:
        digest = self.saved.meta.get("encoding")
        return (
            None if digest is None else open_encoding(self.workdir / ENCODING, digest)
        )


def open_run(workdir: pathlib.Path, *, best: bool) -> SourceRun:
    """Returns a run at its newest checkpoint, or that of its best evaluation, if any.

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


def keep_encoding(splits: Splits, workdir: pathlib.Path):
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
