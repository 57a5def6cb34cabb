"""Several tasks: their labels, the loss of all, the numbers of each."""

import chex
import jax
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from loka_jax.models import Mmoe
from loka_jax.optim import OptimConfig, Sgd
from loka_jax.train import metrics, tasks
from loka_jax.train.logs.log_lines import measure
from loka_jax.train.tables.update import RowUpdate
from tests.support import linear
from tests.support.linear import SIZE, Linear, expected, make_batch

MODEL = Mmoe(
    bottom_mlp=(), expert_mlp=(16,), tower_mlp=(16,), num_experts=2, recipe="f32"
)


def incomplete(missing):
    """Returns a batch of two tasks, some labels missing, of unequal weights."""
    batch = make_batch(tasks=2)
    batch.labels[missing] = np.nan
    batch.weights[:] = np.random.default_rng(7).uniform(0.5, 3, SIZE)
    batch.weights[-3:] = 0
    return batch


def test_the_loss_is_the_weighted_sum_of_each_task_s_mean():
    """By the step of plain SGD, as gradients are linear in the loss."""
    state = linear.make_state(Linear(2), linear.sgd(), Sgd(), weighted=True)
    rows, weights = RowUpdate(Sgd(), lambda step: 0.5, 0.0), (2.0, 0.25)
    objective = tasks.Objective(weights)
    step = linear.step_of(Linear(2), linear.sgd(), rows, objective=objective)
    batch = incomplete(np.s_[:20, 1])
    after = step(state, batch)
    _, gradients, of_rows = expected(state, batch, weights)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, gradients)
    chex.assert_trees_all_close(after.params, want, rtol=1e-5, atol=1e-6)
    moved = np.asarray(after.table - state.table)
    np.testing.assert_allclose(moved, -0.5 * of_rows, rtol=1e-4, atol=1e-6)
    counts = [int(part.count) for part in metrics.split_tasks(after.metrics)]
    assert counts == [SIZE - 3, SIZE - 3 - 20]
    after = step(state, incomplete(np.s_[:, 1]))  # a task without any label
    second = [np.asarray(x.params["kernel"][:, 1]) for x in (after, state)]
    np.testing.assert_array_equal(*second)
    assert int(after.skipped) == 0


def test_numbers_of_an_evaluation_leave_out_missing_labels():
    batch = incomplete(np.s_[5:11, 1])
    logits = np.float32(np.random.default_rng(3).normal(size=(SIZE, 2)))
    labels, weights = tasks.labels_and_weights(batch)
    seen = metrics.init(weighted=True, tasks=2)
    seen = jax.jit(metrics.update)(seen, logits, labels, weights)
    own = {"mean": lambda scores, labels, weights: labels.mean()}
    found = tasks.evaluated(("a", "b"), seen, logits, batch.labels, batch.weights, own)
    for task, name in enumerate("ab"):
        known = ~np.isnan(batch.labels[:, task])
        x, y, w = logits[known, task], batch.labels[known, task], batch.weights[known]
        part = found["tasks"][name]
        want = roc_auc_score(y, x, sample_weight=w)
        assert part["auc"] == pytest.approx(want, abs=1e-12)
        assert part["metrics"] == {"mean": pytest.approx(y[w > 0].mean())}
        loss = np.logaddexp(0, np.where(y == 1, -x, x))
        assert part["logloss"] == pytest.approx(np.average(loss, weights=w), rel=1e-6)


def test_numbers_by_task():
    click = {"auc": 0.5, "logloss": 0.4, "ne": 1.0, "calibration": 1.2}
    buy = {"auc": 0.7, "logloss": 0.2, "ne": None, "calibration": 0.8}
    numbers = {"click": click, "buy": buy}
    found = tasks.by_task(numbers)
    means = dict(auc=0.6, logloss=pytest.approx(0.3), ne=None, calibration=None)
    assert found == means | {"tasks": numbers}
    assert measure(found, OptimConfig(best_by="auc")) == 0.6
    assert measure(found, OptimConfig(best_by="auc", best_task="buy")) == 0.7
    assert tasks.by_task({"click": click}) is click


@pytest.mark.parametrize(
    "num_tasks, optim, what",
    [
        (3, {}, "predicts 3: set --num-tasks 2"),
        (2, dict(task_weights=(1.0,)), "--optim.task-weights .*there"),
        (2, dict(best_task="view"), "--optim.best-task view must be"),
    ],
)
def test_other_tasks_than_those_of_the_data_are_refused(num_tasks, optim, what):
    with pytest.raises(ValueError, match=what):
        names, model = ("click", "buy"), Mmoe(num_tasks=num_tasks)
        tasks.check_tasks(names, model, OptimConfig(**optim))
