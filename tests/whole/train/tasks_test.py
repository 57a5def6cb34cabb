"""A run of several tasks, from the file to the page and to scores."""

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax import jsonfile
from loka_jax.train.config import RunOptions
from loka_jax.train.scores import read_scores
from tests.support.configs import tiny
from tests.support.train import lines, summary, train


def config(folder):
    rng, path = np.random.default_rng(0), folder / "clicks.parquet"
    user = rng.integers(0, 8, 300)
    buy = np.where(rng.random(300) < 0.3, np.nan, rng.random(300) < 0.1 * user)
    table = {"click": (rng.random(300) < 0.2 + 0.08 * user).astype(int)}
    table |= {"buy": pa.array(buy, from_pandas=True), "user": [f"u{i}" for i in user]}
    parquet.write_table(pa.table(table | {"age": rng.normal(size=300)}), path)
    base = tiny("fp8_mmoe")
    columns = dict(labels=("click", "buy"), categorical=("user",), dense=("age",))
    files = dict(path=str(path), cache=str(folder / "cache"))
    steps = dict(batch_size=64, max_steps=6, eval_every=3, log_every=3)
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, **files, **columns),
        optim=dataclasses.replace(base.optim, best_task="buy"),
        loop=dataclasses.replace(base.loop, **steps),
        run=RunOptions(workdir=folder / "run"),
    )


def test_a_run_says_the_numbers_of_each_task(tmp_path):
    code, said = train(config(tmp_path))
    workdir = tmp_path / "run"
    assert code == 0
    for line in lines(workdir):
        parts = line["tasks"]
        assert list(parts) == ["click", "buy"]
        mean = (parts["click"]["ne"] + parts["buy"]["ne"]) / 2
        assert line["ne"] == pytest.approx(mean)
    assert "valid, mean of 2 tasks: AUC" in said and "  buy: AUC" in said
    assert "best by NE of buy" in summary(workdir)["final_state"]
    evals = [line for line in lines(workdir) if line["kind"] == "eval"]
    best = min(evals, key=lambda line: line["tasks"]["buy"]["ne"])
    assert summary(workdir)["best_valid"]["step"] == best["step"]
    found = jsonfile.as_dict(jsonfile.read(workdir / "evaluation.json"))
    assert list(found["tasks"]) == list(read_scores(workdir)) == ["click", "buy"]
    assert found["tasks"]["click"]["examples"] > found["tasks"]["buy"]["examples"]
    page = (workdir / "report.html").read_text()
    assert "AUC, buy" in page and "Calibration and columns, valid, buy" in page
