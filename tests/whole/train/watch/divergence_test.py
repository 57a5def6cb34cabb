"""Runs that diverge: they fail, and keep their healthy checkpoints."""

import dataclasses

import jax
import pytest

from loka_jax.train.loop import Loop
from loka_jax.train.watch.guard import TrainingFailed
from tests.support import train as support
from tests.support.recorded import newest
from tests.support.train import config, train


def explode(monkeypatch, step):
    """Makes the parameters huge before a step."""
    plain = Loop.step

    def spy(self, taken):
        if self.progress.step == step:
            params = jax.tree.map(lambda x: 1e4 * x, self.state.params)
            self.state = dataclasses.replace(self.state, params=params)
        plain(self, taken)

    monkeypatch.setattr(Loop, "step", spy)


def test_healthy_checkpoints_stay(tmp_path, monkeypatch):
    support.share_steps(monkeypatch)
    explode(monkeypatch, 9)
    options = {"log_every": 2, "eval_every": 4, "save_every": 1, "keep_checkpoints": 2}
    with pytest.raises(TrainingFailed, match="step 9 is saved"):
        train(config(tmp_path, **options))
    assert not (tmp_path / "summary.json").exists()
    kept = (tmp_path / "checkpoints").glob("[0-9]*")
    assert sorted(int(path.name) for path in kept) == [8, 9]
    saved, _ = newest(tmp_path / "checkpoints")
    assert saved.meta["progress"]["guard"]["bad_windows"] == 0
    with pytest.raises(TrainingFailed):  # as the same steps would do
        train(config(tmp_path, resume=True, **options))
