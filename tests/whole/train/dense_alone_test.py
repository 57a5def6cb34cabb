"""A table without categorical columns, from training to scores."""

import numpy as np
import pytest

from loka_jax.data import DataConfig
from loka_jax.export.folder import export_run
from loka_jax.models import Dlrm
from loka_jax.predict import load, score_file
from loka_jax.train.config import Config, LoopConfig, RunOptions
from tests.support import train as support


def test_dense_columns_alone_are_enough(tmp_path):
    draw = np.random.default_rng(0)
    lines = [f"{i % 3 // 2},{x},{y}" for i, (x, y) in enumerate(draw.random((400, 2)))]
    (tmp_path / "log.csv").write_text("\n".join(["click,x,y", *lines, ""]))
    run = RunOptions(workdir=tmp_path / "run")
    options = {"path": str(tmp_path / "log.csv"), "cache": str(tmp_path / "cache")}
    own = Config(
        name="dense",
        model=Dlrm(bottom_mlp=(8,), top_mlp=(8,), recipe="bf16", first_order=True),
        data=DataConfig(kind="table", label="click", dense=("x", "y"), **options),
        loop=LoopConfig(batch_size=64, max_steps=2),
        run=run,
    )
    code, out = support.train(own)
    assert code == 0 and "step 2, the last" in out
    lines = [f"{x},{x}" for x in (-3.0, 1.5)]
    (tmp_path / "new.csv").write_text("\n".join(["x,y", *lines, ""]))
    with_file = score_file(load(run.workdir), tmp_path / "new.csv", tmp_path / "s.csv")
    scores = [float(x) for x in (tmp_path / "s.csv").read_text().split()[1:]]
    assert with_file.rows == 2 and 0 < scores[0] != scores[1] < 1
    with pytest.raises(ValueError, match="without categorical columns"):
        export_run(run.workdir, tmp_path / "out")
