"""Runs that diverge: they fail, and keep their healthy checkpoints."""

import dataclasses

import jax
import numpy as np
import pytest

from loka_jax.train.checkpoints.checkpoint import Checkpoints
from loka_jax.train.loop import Loop
from loka_jax.train.watch.guard import TrainingFailed
from tests.support import train as support
from tests.support.train import config, lines, summary, train


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    support.share_steps(monkeypatch)


def explode(monkeypatch, *steps):
    """Makes the parameters huge, once before each of the steps."""
    left, plain = list(steps), Loop.step

    def spy(self, taken):
        if left and self.progress.step == left[0]:
            left.pop(0)
            params = jax.tree.map(lambda x: 1e4 * x, self.state.params)
            self.state = dataclasses.replace(self.state, params=params)
        plain(self, taken)

    monkeypatch.setattr(Loop, "step", spy)


def test_healthy_checkpoints_stay(tmp_path, monkeypatch):
    explode(monkeypatch, 9)
    options = {"log_every": 2, "eval_every": 4, "save_every": 1, "keep_checkpoints": 2}
    with pytest.raises(TrainingFailed, match="step 9 is saved"):
        train(config(tmp_path, **options))
    assert not (tmp_path / "summary.json").exists()
    kept = (tmp_path / "checkpoints").glob("[0-9]*")
    assert sorted(int(path.name) for path in kept) == [8, 9]
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        saved = checkpoints.newest()
    assert saved.meta["progress"]["guard"]["bad_windows"] == 0
    with pytest.raises(TrainingFailed):  # as the same steps would do
        explode(monkeypatch, 9)
        train(config(tmp_path, resume=True, **options))


def test_a_run_goes_back_where_that_is_asked_for(tmp_path, monkeypatch):
    explode(monkeypatch, 9)
    options = {"log_every": 2, "eval_every": 4, "on_divergence": "go_back"}
    code, said = train(config(tmp_path, **options))
    assert code == 0 and "Went back to step 8, learning rates halved" in said
    found = summary(tmp_path)
    assert found["steps"] == 20 and len(found["returns"]) == 1
    assert np.isfinite(found["final_eval"]["logloss"])
    rates = [(x["step"], x["lr"]) for x in lines(tmp_path) if x["kind"] == "train"]
    assert [step for step, _ in rates] == [*range(2, 21, 2)]  # each once
    assert dict(rates)[10] == pytest.approx(dict(rates)[8] / 2)
