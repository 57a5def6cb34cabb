"""Four whole runs that tests read, each trained once in a test session.

    def test_something(recorded):            # a fixture of tests/whole/conftest.py
        run = recorded("fp8")
        assert summary(run.workdir)["finished"]

    bf16     a CSV file of 200 rows in bf16: 6 steps, TensorBoard events; the last state
             is judged
    fp8      generated data with delayed scales and dropout: 20 steps, log lines every
             3, evaluations and checkpoints every 5; the best state is kept and judged
    mesh     the same on 2 x 4 devices, each with 16 examples of a step, as few as FP8
             takes
    resumed  that of `fp8`, stopped by SIGTERM in steps 7 and 12, and resumed twice

They run as users' runs do: no step is shared and nothing is replaced. Their folders are
read-only. A test that changes one, or resumes it, does so in a copy, for which
`run.copy(folder)` returns the configuration. The workers of a session share them.
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import shutil
import signal
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.saved_format import CHECKPOINTS
from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.config import Config, RunOptions
from loka_jax.train.loop import Loop
from loka_jax.train.mesh.devices import MeshConfig
from tests.support import predict
from tests.support import train as support

NAMES = ("bf16", "fp8", "mesh", "resumed")
STOPPED_IN = (7, 12)  # steps in which `resumed` is stopped
_PRINTED = "printed.txt"


class Recorded(NamedTuple):
    """A run that has been trained, what it printed, and the folder of its CSV files."""

    config: Config
    printed: str
    data: pathlib.Path

    @property
    def workdir(self) -> pathlib.Path:
        """The folder of the run's files."""
        return _workdir_of(self.config)

    def arrays(self, folder: str = CHECKPOINTS) -> dict[str, np.ndarray]:
        """Returns the leaves of the newest checkpoint by their paths."""
        return newest(self.workdir / folder)[1]

    def copy(self, folder: pathlib.Path, **run) -> Config:
        """Copies the run into a folder that a test may change."""
        workdir = folder / "run"
        shutil.copytree(self.workdir, workdir)
        _set_writable(workdir, True)
        return dataclasses.replace(self.config, run=RunOptions(workdir=workdir, **run))


def _zeros(text: str) -> np.ndarray:
    """Returns zeros of a dtype and shape in a manifest, such as "float32[8, 4]"."""
    dtype, _, sizes = text.removesuffix("]").partition("[")
    return np.zeros([int(x) for x in sizes.split(",") if x], jnp.dtype(dtype))


def newest(folder: pathlib.Path) -> tuple[Saved, dict[str, np.ndarray]]:
    """Returns the newest of the checkpoints in a folder, and its leaves by path."""
    with Checkpoints(folder) as checkpoints:
        saved = checkpoints.newest()
        assert saved is not None
        template = {k: _zeros(text) for k, text in saved.leaves.items()}
        return saved, checkpoints.read(saved, template)


def recorded(name: str, root: pathlib.Path) -> Recorded:
    """Returns a run below a folder that the workers of a session share."""
    folder = root / "recorded" / name
    folder.mkdir(parents=True, exist_ok=True)
    config, printed = _config(name, folder), folder / _PRINTED
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not printed.exists():  # it is written last
            printed.write_text(_trained(name, config))
            _set_writable(_workdir_of(config), False)
    return Recorded(config, printed.read_text(), folder)


def _workdir_of(config: Config) -> pathlib.Path:
    assert config.run.workdir is not None
    return config.run.workdir


def _config(name: str, folder: pathlib.Path) -> Config:
    workdir = folder / "run"
    if name == "bf16":
        config = predict.config(folder, test=str(folder / "test.csv"))
        model = config.model.clone(recipe="bf16")
        run = dataclasses.replace(config.run, track=("tensorboard",))
        return dataclasses.replace(config, model=model, run=run)
    if name != "mesh":
        return support.config(workdir, patience=50)
    larger = dict(batch_size=8 * 16, epochs=7, max_steps=20)
    config = support.config(workdir, patience=50, **larger)
    return dataclasses.replace(config, mesh=MeshConfig(replicas=2, shards=4))


def _trained(name: str, config: Config) -> str:
    """Returns what a run prints while it is trained."""
    shutil.rmtree(_workdir_of(config), ignore_errors=True)
    if name == "bf16":
        predict.write_both(_workdir_of(config).parent)
    printed = []
    for step in STOPPED_IN if name == "resumed" else ():
        with _stopped_in(step):
            code, said = support.train(config)
        assert code == 128 + signal.SIGTERM
        printed.append(said)
        resumed = dataclasses.replace(config.run, resume=True)
        config = dataclasses.replace(config, run=resumed)
    code, said = support.train(config)
    assert code == 0, said
    return "".join([*printed, said])


@contextlib.contextmanager
def _stopped_in(step: int):
    """Stops a run by SIGTERM in a step, which it ends."""
    plain = Loop.step

    def stopped(self, pairs):
        if self.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        plain(self, pairs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "step", stopped)
        yield


def _set_writable(folder: pathlib.Path, writable: bool):
    for path in (folder, *folder.rglob("*")):
        mode = path.stat().st_mode
        path.chmod(mode | 0o200 if writable else mode & ~0o222)
