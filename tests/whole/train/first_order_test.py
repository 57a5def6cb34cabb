"""Runs on dense columns, which start at a regression, from training to scores."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from loka_jax.data import DataConfig
from loka_jax.export.folder import export_run
from loka_jax.models import Dlrm
from loka_jax.optim import OptimConfig
from loka_jax.predict import load, score_file
from loka_jax.train import baselines
from loka_jax.train.config import Config, LoopConfig, RunOptions
from loka_jax.train.logs import log_lines
from tests.support import train as support


def config(folder, loop):
    """Returns a run on clicks by chance, in the folder."""
    draw = np.random.default_rng(0)
    lines = [f"{i % 3 // 2},{x},{y}" for i, (x, y) in enumerate(draw.random((400, 2)))]
    (folder / "log.csv").write_text("\n".join(["click,x,y", *lines, ""]))
    options = {"path": str(folder / "log.csv"), "cache": str(folder / "cache")}
    return Config(
        name="dense",
        model=Dlrm(bottom_mlp=(8,), top_mlp=(8,), recipe="bf16", first_order=True),
        data=DataConfig(kind="table", label="click", dense=("x", "y"), **options),
        loop=loop,
        run=RunOptions(workdir=folder / "run"),
    )


def test_dense_columns_alone_are_enough(tmp_path):
    workdir = tmp_path / "run"
    code, out = support.train(config(tmp_path, LoopConfig(batch_size=64, max_steps=2)))
    assert code == 0 and "step 2, the last" in out
    lines = [f"{x},{x}" for x in (-3.0, 1.5)]
    (tmp_path / "new.csv").write_text("\n".join(["x,y", *lines, ""]))
    with_file = score_file(load(workdir), tmp_path / "new.csv", tmp_path / "s.csv")
    scores = [float(x) for x in (tmp_path / "s.csv").read_text().split()[1:]]
    assert with_file.rows == 2 and 0 < scores[0] != scores[1] < 1
    with pytest.raises(ValueError, match="without categorical columns"):
        export_run(workdir, tmp_path / "out")


def test_the_start_is_kept_unless_a_state_is_clearly_better(monkeypatch, tmp_path):
    """Of two steps on clicks by chance, the second of which passes for the best."""
    own = config(tmp_path, LoopConfig(batch_size=64, max_steps=2, eval_every=1))
    own = dataclasses.replace(own, optim=OptimConfig(plateau_patience=9))
    after = log_lines.measure
    by_step = lambda line, optim: -float(line["step"])  # noqa: E731
    monkeypatch.setattr(log_lines, "measure", by_step)
    fit = mock.Mock(side_effect=baselines.fit_regressions)
    monkeypatch.setattr(baselines, "fit_regressions", fit)
    code, out = support.train(own)
    monkeypatch.setattr(log_lines, "measure", after)
    assert code == 0 and "Step 2 is not clearly better than the regression" in out
    fit.assert_called_once()  # for the start, the comparison and the summary
    found = support.summary(tmp_path / "run")
    assert found["final_step"] == 0
    assert found["final_state"] == "the regression at the start"
    regression = found["baseline_ne"]["logistic_regression"]
    assert found["final_eval"]["ne"] == pytest.approx(regression, abs=2e-3)
    assert load(tmp_path / "run").step == 0
