"""`loka sweep` as a user runs it: interrupted, then by two processes at once."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.support.commands import ROOT, signalled
from tests.support.configs import tiny_config

optuna = pytest.importorskip("optuna")


def test_a_sweep_is_interrupted_and_ended_by_two_processes(tmp_path):
    folder = tmp_path / "sweep"
    command = [sys.executable, ROOT / "experiments/sweep.py"]
    command += ["--config", tiny_config("bf16_dlrm"), "--workdir", folder]
    command += ["--trials", 2, "--space", "optim.lr=1e-3:1e-2:log"]
    command = [str(word) for word in command]
    code, _ = signalled(command, signal.SIGINT, folder, "trial-0/metrics.jsonl")
    assert code == 130
    both = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    trials = optuna.load_study(
        study_name="sweep", storage=f"sqlite:///{folder / 'study.db'}"
    ).trials
    done = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert len(done) == 2 and trials[0].state.name == "FAIL"
    first, *others = [x for x in trials if x.user_attrs["folder"] == "trial-0"]
    assert [x.params for x in others if x in done] == [first.params]
    best = min(done, key=lambda trial: trial.value)
    rate = best.params["--optim.lr"]
    for printed in said:  # both know of all trials when they end
        assert f"validation NE {best.value:.5f}, by\n" in printed
        assert re.search(rf"train.py --config .* --optim.lr {rate}\n", printed)
    workdir = folder / best.user_attrs["folder"]
    run = json.loads((workdir / "summary.json").read_text())
    assert run["config"]["optim"]["lr"] == rate
    assert run["best_valid"]["ne"] == pytest.approx(best.value, abs=1e-7)
