"""Several tasks, from the batch to the summary; one task as if there were no others."""

import dataclasses
import io
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pytest
from pyarrow import parquet
from rich.console import Console

from experiments import configs
from loka_jax import jsonfile, nn, predict
from loka_jax.data import Batch
from loka_jax.models import Mmoe
from loka_jax.ops import embedding
from loka_jax.optim import OptimConfig, Sgd
from loka_jax.probe.capture import Capture
from loka_jax.train import build as build_lib
from loka_jax.train import metrics, session, tasks
from loka_jax.train.config import RunOptions
from loka_jax.train.folder.scores_file import read_scores
from loka_jax.train.logs.log_lines import measure
from loka_jax.train.state import init_state
from loka_jax.train.step import RowUpdate, make_observe_step, make_train_step
from tests.support.train import lines, summary

TABLES = embedding.TableSpec(rows=(20, 10, 5), dim=16)
MODEL = Mmoe(
    bottom_mlp=(), expert_mlp=(16,), tower_mlp=(16,), num_experts=2, recipe="f32"
)
ONE = MODEL.clone(num_tasks=1)
SIZE = 32


def make_batch(num_tasks=2, missing=()) -> Batch:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (SIZE, num_tasks)).astype(np.float32)
    for row, task in missing:
        labels[row, task] = np.nan
    weights = np.ones(SIZE, np.float32)
    weights[-3:] = 0  # padding
    return Batch(
        dense=rng.normal(size=(SIZE, 4)).astype(np.float32),
        ids=rng.integers(0, TABLES.rows, (SIZE, 3)).astype(np.int32),
        labels=labels if num_tasks > 1 else labels[:, 0],
        weights=weights,
    )


def make_state(model):
    state = init_state(
        jax.random.key(0),
        model=model,
        tables=TABLES,
        num_dense=4,
        optimizer=optax.sgd(0.1),
        row_optimizer=Sgd(),
        init_stddev=0.5,
    )
    return dataclasses.replace(state, metrics=metrics.init(tasks=model.num_tasks))


def make_step(model, **options):
    rows = RowUpdate(Sgd(), lambda step: 0.1, 0.0)
    step = make_train_step(model, TABLES, optax.sgd(0.1), rows, **options)
    return jax.jit(step)


# The loss.


def test_the_loss_is_the_weighted_sum_of_each_task_s_mean():
    """Compared by the step of plain SGD: the gradients are linear in the loss."""
    missing = [(row, 1) for row in range(0, 20)]
    batch = make_batch(missing=missing)
    state = make_state(MODEL)
    after = make_step(MODEL, task_weights=(2.0, 0.5))(state, batch)

    def loss_of(params):
        rows = np.split(np.asarray(state.table), np.cumsum(TABLES.rows)[:-1])
        found = [rows[f][batch.ids[:, f]] for f in range(3)]
        inputs = (jnp.asarray(batch.dense), jnp.stack(found, axis=1))
        logits = MODEL.apply({"params": params}, *inputs)
        loss = optax.sigmoid_binary_cross_entropy
        first = loss(logits[:-3, 0], batch.labels[:-3, 0])
        second = loss(logits[20:-3, 1], batch.labels[20:-3, 1])
        return 2 * jnp.mean(first) + 0.5 * jnp.mean(second)

    gradients = jax.grad(loss_of)(state.params)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradients)
    chex.assert_trees_all_close(after.params, expected, rtol=1e-5, atol=1e-6)
    first, second = metrics.split_tasks(after.metrics)
    assert (int(first.count), int(second.count)) == (SIZE - 3, SIZE - 3 - 20)


def test_microbatches_give_the_same_step():
    batch = make_batch(missing=[(0, 0), (1, 0), (9, 1)])
    state = make_state(MODEL)
    whole = make_step(MODEL, task_weights=(1.0, 3.0))(state, batch)
    parts = make_step(MODEL, task_weights=(1.0, 3.0), microbatches=4)(state, batch)
    chex.assert_trees_all_close(whole.params, parts.params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(whole.table, parts.table, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(whole.metrics.loss, parts.metrics.loss, rtol=1e-5)


def test_observed_gradients_are_as_large_as_the_step_has():
    batch, state = make_batch(missing=[(0, 0), (9, 1)]), make_state(MODEL)

    def gradients(task_weights, batch, total_weight=None):
        observe = make_observe_step(MODEL, TABLES, Capture(), task_weights)
        seen = nn.by_path(jax.jit(observe)(state, batch, total_weight))
        return {path: operands.g for path, operands in seen.items()}

    equal = gradients((), batch)
    assert all(np.any(g) for g in equal.values()) and len(equal) > 1
    triple = {path: 3 * g for path, g in equal.items()}
    # A sum over some 30 float32 numbers below 0.03 is right to 1e-7.
    close = {"rtol": 1e-5, "atol": 1e-7}
    chex.assert_trees_all_close(gradients((3.0, 3.0), batch), triple, **close)
    total_weight = jnp.sum(tasks.labels_and_weights(batch)[1], axis=0)
    half = jax.tree.map(lambda x: x[: SIZE // 2], batch)
    rows = {path: g[: SIZE // 2] for path, g in equal.items()}
    chex.assert_trees_all_close(gradients((), half, total_weight), rows, **close)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_one_task_adds_nothing_to_the_program(monkeypatch, microbatches):
    state, batch = make_state(ONE), make_batch(1)

    def program():
        step = make_step(ONE, microbatches=microbatches)
        return str(step.trace(state, batch).jaxpr)

    found = program()
    monkeypatch.setattr(tasks, "labels_and_weights", lambda x: (x.labels, x.weights))
    monkeypatch.setattr(tasks, "total_loss", lambda losses, task_weights: losses)
    assert program() == found


# The metrics.


def test_metrics_of_tasks_are_those_of_each_alone():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(SIZE, 3)).astype(np.float32)
    labels = make_batch(3).labels
    weights = rng.integers(0, 2, (SIZE, 3)).astype(np.float32)
    together = metrics.init(tasks=3)
    for _ in range(2):
        together = jax.jit(metrics.update)(together, logits, labels, weights)
    merged = metrics.merge(together, metrics.init_like(together))
    for task, part in enumerate(metrics.split_tasks(merged)):
        alone = metrics.init()
        for _ in range(2):
            columns = (jnp.asarray(x[:, task]) for x in (logits, labels, weights))
            alone = metrics.update(alone, *columns)
        chex.assert_trees_all_close(part, jax.device_get(alone), rtol=1e-6)


def test_the_worst_task_tells_divergence():
    logits = jnp.stack([jnp.zeros(SIZE), jnp.full(SIZE, 9.0)], axis=1)
    labels = jnp.arange(2 * SIZE, dtype=jnp.float32).reshape(SIZE, 2) // 2 % 2
    state = metrics.update(metrics.init(tasks=2), logits, labels, jnp.ones((SIZE, 2)))
    good, bad = (metrics.capped_ne(part).ne for part in metrics.split_tasks(state))
    assert good == pytest.approx(1.0) and metrics.capped_ne(state).ne == bad > 6
    state = metrics.update(state, logits.at[0, 0].set(jnp.nan), labels, labels * 0 + 1)
    assert math.isnan(metrics.capped_ne(state).ne or 0.0)


def test_numbers_by_task():
    numbers = {
        "click": {"auc": 0.5, "logloss": 0.4, "ne": 1.0, "calibration": 1.2},
        "buy": {"auc": 0.7, "logloss": 0.2, "ne": None, "calibration": 0.8},
    }
    found = tasks.by_task(numbers)
    assert found["auc"] == 0.6 and found["logloss"] == pytest.approx(0.3)
    assert found["ne"] is None and found["calibration"] is None
    assert found["tasks"] == numbers
    assert measure(found, OptimConfig(best_by="auc")) == 0.6
    assert measure(found, OptimConfig(best_by="auc", best_task="buy")) == 0.7
    assert tasks.by_task({"click": numbers["click"]}) is numbers["click"]


# A whole run.


def table(count=300, seed=0):
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 8, count)
    click = rng.random(count) < 0.2 + 0.08 * user
    buy = np.where(rng.random(count) < 0.3, np.nan, rng.random(count) < 0.1 * user)
    return pa.table(
        {
            "click": click.astype(int),
            "buy": pa.array(buy, from_pandas=True),
            "user": [f"u{i}" for i in user],
            "age": rng.normal(size=count),
        }
    )


def config(folder, *, best_task=None):
    path = folder / "clicks.parquet"
    parquet.write_table(table(), path)
    base = configs.get_config("fp8_mmoe_tiny")
    return dataclasses.replace(
        base,
        data=dataclasses.replace(
            base.data,
            path=str(path),
            labels=("click", "buy"),
            categorical=("user",),
            dense=("age",),
            cache=str(folder / "cache"),
        ),
        optim=dataclasses.replace(
            base.optim, task_weights=(1.0, 0.5), best_task=best_task
        ),
        loop=dataclasses.replace(
            base.loop, batch_size=64, max_steps=6, eval_every=3, log_every=3
        ),
        run=RunOptions(workdir=folder / "run"),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    out = io.StringIO()
    console = Console(file=out, width=120, soft_wrap=True)
    done = session.train(config(folder, best_task="buy"), [], console)
    assert done.exit_code == 0
    return folder / "run", out.getvalue()


def test_a_run_says_the_numbers_of_each_task(trained):
    workdir, said = trained
    for line in lines(workdir):
        parts = line["tasks"]
        assert list(parts) == ["click", "buy"]
        mean = (parts["click"]["ne"] + parts["buy"]["ne"]) / 2
        assert line["ne"] == pytest.approx(mean)
    final = summary(workdir)["final_eval"]
    assert final["calibration"] is None and final["tasks"]["buy"]["calibration"] > 0
    assert "valid, mean of 2 tasks: AUC" in said and "  buy: AUC" in said
    assert "best by NE of buy" in summary(workdir)["final_state"]
    page = (workdir / "report.html").read_text()
    assert "AUC, buy" in page


def test_the_final_evaluation_of_each_task_is_broken_down(trained):
    workdir, _ = trained
    found = jsonfile.as_dict(jsonfile.read(workdir / "evaluation.json"))
    final = summary(workdir)["final_eval"]["tasks"]
    kept = np.load(workdir / "scores.npy")
    read = read_scores(workdir)
    assert list(found["tasks"]) == list(read) == ["click", "buy"]
    for name, scored in read.items():
        labels = kept[name]["labels"]
        assert np.isnan(labels).any() == (name == "buy")
        assert np.array_equal(scored.labels, labels[~np.isnan(labels)])
        logits = scored.logits.astype(np.float64)
        losses = np.logaddexp(0, np.where(scored.labels == 1, -logits, logits))
        assert losses.mean() == pytest.approx(final[name]["logloss"], rel=1e-5)
        parts = found["tasks"][name]
        counted = sum(row["count"] for row in parts["calibration_curve"])
        assert counted == parts["examples"] == len(scored.labels)
        assert [column["column"] for column in parts["columns"]] == ["user"]
    assert found["tasks"]["click"]["examples"] > found["tasks"]["buy"]["examples"]
    page = (workdir / "report.html").read_text()
    assert "Calibration and columns, valid, buy" in page


def test_a_run_is_judged_by_its_task(trained):
    workdir, _ = trained
    evals = [line for line in lines(workdir) if line["kind"] == "eval"]
    best = min(evals, key=lambda line: line["tasks"]["buy"]["ne"])
    assert summary(workdir)["best_valid"]["step"] == best["step"]


def test_scores_of_each_task_are_those_of_training(trained, tmp_path):
    workdir, _ = trained
    path, out = tmp_path / "new.parquet", tmp_path / "scores.parquet"
    parquet.write_table(table(70, seed=1).drop_columns(["click", "buy"]), path)
    predictor = predict.load(workdir)
    predict.score_file(predictor, path, out, keys=("user",))
    scores = parquet.read_table(out)
    assert scores.column_names == ["user", "score_click", "score_buy"]
    direct = predictor.scores(table(70, seed=1))
    columns = [scores["score_click"], scores["score_buy"]]
    assert np.array_equal(np.stack(columns, axis=1), direct)
    assert 0 < direct.min() and direct.max() < 1


def test_a_model_of_one_task_refuses_two_labels():
    model = configs.get_config("csv_dlrm").model
    with pytest.raises(ValueError, match="the Dlrm predicts 1: name one with --data"):
        tasks.check_tasks(("click", "buy"), model, OptimConfig())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (dict(model=MODEL.clone(num_tasks=3)), "predicts 3: set --num-tasks 2"),
        (dict(optim=OptimConfig(task_weights=(1.0,))), "--optim.task-weights .*there"),
        (dict(optim=OptimConfig(best_task="view")), "--optim.best-task view must be"),
    ],
)
def test_other_tasks_than_those_of_the_data_are_refused(tmp_path, change, what):
    with pytest.raises(ValueError, match=what):
        build_lib.build(dataclasses.replace(config(tmp_path), **change))
