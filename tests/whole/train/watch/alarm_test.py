"""Alarms of whole runs: none in a healthy one, one for a weight that grows."""

import dataclasses

import pytest

from loka_jax.train.config import ProbeOptions
from loka_jax.train.loop import Loop
from loka_jax.train.watch.alarm import THRESHOLDS
from loka_jax.train.watch.guard import TrainingFailed
from tests.support import train as support

GROWN, SINCE = "top_mlp", 60  # after enough observed steps


def run(workdir, **loop):
    loop = dict(epochs=12, log_every=2, eval_every=60, save_every=60) | loop
    config = support.config(workdir, **loop)
    probe = ProbeOptions(every=1, recipes=("fp8_tensorwise_delayed",))
    return support.train(dataclasses.replace(config, probe=probe, plan="off"))


def grow(monkeypatch):
    """Multiplies a weight by 1.1 before each step."""
    plain = Loop.step

    def step(self, pairs):
        if self.progress.step >= SINCE:
            params = dict(self.state.params)
            layer = dict(params[GROWN])
            layer["dense_0"] = layer["dense_0"] | {
                "kernel": 1.1 * layer["dense_0"]["kernel"]
            }
            params[GROWN] = layer
            self.state = dataclasses.replace(self.state, params=params)
        plain(self, pairs)

    monkeypatch.setattr(Loop, "step", step)


def test_a_weight_that_grows_raises_an_alarm_and_a_healthy_run_none(
    tmp_path, monkeypatch
):
    support.share_steps(monkeypatch)
    code, _ = run(tmp_path / "healthy")
    assert code == 0 and support.summary(tmp_path / "healthy")["alarms"] == []
    lines = support.lines(tmp_path / "healthy", "amaxes.jsonl")
    assert len(lines) == 60
    (site,) = {x.rpartition("/")[0] for x in lines[-1] if x.startswith("top_mlp")}
    names = {x.rpartition("/")[2] for x in lines[-1] if x.startswith(site)}
    assert names >= {"lhs_kurtosis", "g_worst_kurtosis", "out_rms", "growth", "g_zeros"}
    assert any(x.endswith("gradient_to_noise") for x in lines[-1])

    grow(monkeypatch)
    alarm = r"stop\): step \d+: top_mlp/dense_0: its output is .* and grows"
    with pytest.raises(TrainingFailed, match=alarm) as stopped:
        run(tmp_path / "grown", on_alarm="stop", save_every=2)
    step = int(str(stopped.value).partition("step ")[2].partition(":")[0])
    assert SINCE + THRESHOLDS.recent < step < SINCE + 45
    saved = [int(x.name) for x in (tmp_path / "grown/checkpoints").glob("[0-9]*")]
    assert max(saved) == step - 2
