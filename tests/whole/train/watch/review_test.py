"""Live errors change the plan of runs, interrupted or not."""

import dataclasses
import json

import numpy as np
import pytest

from loka_jax.dispatch.policy import Limits
from loka_jax.site import BF16
from loka_jax.train import session
from loka_jax.train.config import DispatchOptions, ProbeOptions
from loka_jax.train.loop import Loop
from tests.support import train as support

SITES = BOTTOM, TOP = ("bottom_mlp/dense_1", "top_mlp/dense_0")
PROBE = ProbeOptions(begin=0, recipes=("fp8_rowwise",))
# Batches of 32 examples have errors that differ widely from step to step.
LIMITS = Limits(healthy=3.0, worst_row=30.0)
PLANTED_ID, SINCE = 7, 4


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    support.share_data(monkeypatch)
    monkeypatch.setattr("loka_jax.train.loop_options.LOOK_EVERY", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _config(workdir, plan, probe=PROBE, **loop):
    config = support.config(workdir, **{"eval_every": 4} | loop)
    dispatch = DispatchOptions(limits=LIMITS)
    return dataclasses.replace(config, plan=str(plan), probe=probe, dispatch=dispatch)


def _plant_outlier(monkeypatch):
    """Plants a huge embedding in an example of each batch, and interrupts a run once.

    The example has weight zero, and so adds nothing to drhs. Beside it, the other rows
    of `top_mlp/dense_0`'s lhs are zeros in FP8.
    """
    step, observe, kills = Loop.step, Loop._observe, [SINCE + 2]

    def planted(self, batch):
        if self.progress.step < SINCE:
            return batch
        ids, weights = np.array(batch.ids), np.array(batch.weights)
        ids[ids[:, 0] == PLANTED_ID, 0] = 0
        ids[0, 0], weights[0] = PLANTED_ID, 0.0
        return batch._replace(ids=ids, weights=weights)

    def observe_planted(self, batch):
        if self.progress.step in kills:
            kills.clear()
            raise KeyboardInterrupt
        if self.progress.step == SINCE:
            table = self.state.table.at[PLANTED_ID].set(1e6)
            self.state = dataclasses.replace(self.state, table=table)
        observe(self, planted(self, batch))

    def step_planted(self, taken):
        step(self, [(position, planted(self, batch)) for position, batch in taken])

    monkeypatch.setattr(Loop, "_observe", observe_planted)
    monkeypatch.setattr(Loop, "step", step_planted)


def test_sites_enter_fp8_by_live_errors_and_leave_it(tmp_path, monkeypatch):
    slow = dict(bf16_us=2e7, fp8_us=1e7)  # of which a few steps pay for entering FP8
    table = support.write_table(tmp_path / "table.json", source="another", **slow)
    _plant_outlier(monkeypatch)
    monkeypatch.setattr(session, "build", support.build)
    workdir = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        support.train(_config(workdir, table, max_steps=12))
    resumed = _config(workdir, table, max_steps=12, resume=True)
    code, said = support.train(resumed)
    assert code == 0 and "Resuming at step 4" in said
    changes = support.summary(workdir)["changes"]
    why = "its live errors are within the limits"
    promoted = [f"step 4: {path} runs by {support.ROW} now: {why}." for path in SITES]
    assert changes[:2] == promoted
    (demoted,) = changes[2:]  # at step 6, the first review beside evaluations
    assert f"step 6: {TOP} runs in bfloat16 now: the live error of its drhs" in demoted
    assert said.count(demoted) == 1 and demoted in (workdir / "report.html").read_text()
    plan = json.loads((workdir / "plan.json").read_text())
    assert plan[BOTTOM]["choice"] == support.ROW and plan[BOTTOM]["reason"] == why
    assert plan[TOP]["choice"] == BF16.name and "drhs" in plan[TOP]["reason"]

    # The plan is that of the checkpoint, which needs no table.
    table.unlink()
    code, said = support.train(resumed)
    assert code == 0 and "Live errors will not change the plan: --plan" in said
    assert json.loads((workdir / "plan.json").read_text()) == plan
    assert support.summary(workdir)["changes"] == changes
