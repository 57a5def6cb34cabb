"""A run of several tasks, from the file to the page and to scores."""

import dataclasses

import chex
import jax
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loka_jax import jsonfile, nn
from loka_jax.models import Mmoe
from loka_jax.optim import Sgd
from loka_jax.probe.site import Capture
from loka_jax.train import tasks
from loka_jax.train.config import RunOptions
from loka_jax.train.placement import Placement
from loka_jax.train.scores import read_scores
from loka_jax.train.step import make_observe_step
from tests.support import linear
from tests.support.configs import tiny
from tests.support.linear import SIZE, TABLES, make_batch
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


MODEL = Mmoe(
    bottom_mlp=(), expert_mlp=(16,), tower_mlp=(16,), num_experts=2, recipe="f32"
)


def test_observed_gradients_are_as_large_as_the_step_has():
    batch = make_batch(tasks=2)
    batch.labels[0, 0] = batch.labels[9, 1] = np.nan
    state = linear.make_state(MODEL, linear.sgd(), Sgd())

    def gradients(task_weights, batch, total_weight=None):
        own = tasks.Objective(task_weights)
        observe = make_observe_step(MODEL, Placement(TABLES), Capture(), own)
        seen = nn.by_path(jax.jit(observe)(state, batch, total_weight))
        return {path: sample.operands.g for path, sample in seen.items()}

    equal = gradients((), batch)
    assert all(np.any(g) for g in equal.values()) and len(equal) > 1
    triple = {path: 3 * g for path, g in equal.items()}
    # A sum over some 30 float32 numbers below 0.03 is right to 1e-7.
    close = {"rtol": 1e-5, "atol": 1e-7}
    chex.assert_trees_all_close(gradients((3.0, 3.0), batch), triple, **close)
    total_weight = np.sum(tasks.labels_and_weights(batch)[1], axis=0)
    half = jax.tree.map(lambda x: x[: SIZE // 2], batch)
    rows = {path: g[: SIZE // 2] for path, g in equal.items()}
    chex.assert_trees_all_close(gradients((), half, total_weight), rows, **close)
