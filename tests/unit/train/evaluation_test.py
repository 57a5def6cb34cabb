"""An evaluation sees every row once; the final one has a sample of batches."""

import dataclasses
import types
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from loka_jax.data import Position, open_data
from loka_jax.train import evaluation, metrics
from loka_jax.train.evaluation import Evaluated, evaluate_finally
from tests.support import train as support
from tests.support.linear import make_batch
from tests.support.loop import start_state


def test_every_row_of_a_data_set_is_seen_once_and_in_order(monkeypatch):
    batches = [make_batch(seed, size=8) for seed in range(3)]
    batches[2].weights[5:] = 0
    schema = types.SimpleNamespace(labels=("label",))
    dataset: Any = types.SimpleNamespace(schema=schema, num_batches=lambda size: 3)
    update, alive = jax.jit(metrics.update), mock.Mock()

    def step(state, seen, batch):
        logits = batch.dense[:, 0]
        return update(seen, logits, batch.labels, batch.weights), logits

    run: Any = types.SimpleNamespace(
        config=support.config(),
        planned=types.SimpleNamespace(is_delayed=False),
        read=lambda data, step: batches[step],
        fetched=jax.device_get,
        eval_step=lambda model: step,
    )
    monkeypatch.setattr(evaluation.watchdog, "alive", alive)
    found = evaluation.evaluate(run, start_state(), dataset)
    columns = [np.concatenate(x) for x in zip(*(b[:4] for b in batches), strict=True)]
    np.testing.assert_array_equal(found.logits, columns[0][:, 0])
    np.testing.assert_array_equal(found.labels, columns[2])
    np.testing.assert_array_equal(found.weights, columns[3])
    assert found.values["count"] == 21 and alive.call_count == 3
    auc = metrics.auc(found.logits, found.labels, found.weights)
    assert found.values["auc"] == auc


ROWS, SIZE = 60, 16  # three batches, and one with four rows of padding
VALUES = dict.fromkeys(("auc", "logloss", "ne", "calibration", "count"), 0.5)


@pytest.fixture
def finally_of(monkeypatch):
    """Evaluates rows whose logits are their numbers."""
    data = dataclasses.replace(support.DATA, eval_examples=ROWS)
    valid = open_data(data, seed=0).valid
    run: Any = types.SimpleNamespace(config=support.config(batch_size=SIZE))

    def evaluated(**values):
        weights = (np.arange(4 * SIZE) < ROWS).astype(np.float32)
        rows = np.arange(4 * SIZE, dtype=np.float32)
        found = Evaluated(rows, rows % 2, weights, VALUES | values, (SIZE,) * 4)
        monkeypatch.setattr(evaluation, "evaluate", lambda *_: found)
        return evaluate_finally(run, None, valid), valid

    return evaluated


@pytest.mark.parametrize("most, batches", [(64, [0, 1, 2, 3]), (32, [0, 2]), (1, [0])])
def test_a_sample_is_of_batches_at_equal_distances(
    finally_of, monkeypatch, most, batches
):
    monkeypatch.setattr(evaluation, "SAMPLE", most)
    (values, samples), valid = finally_of(non_finite=0)
    (sample,) = samples.values()
    rows = np.concatenate([np.arange(SIZE * i, SIZE * i + SIZE) for i in batches])
    rows = rows[rows < ROWS]
    batch = valid.batch(Position(0, 0, 0), 4 * SIZE, shuffle=False)
    want = (rows, rows % 2, np.ones(len(rows)), np.asarray(batch.ids)[rows])
    jax.tree.map(np.testing.assert_array_equal, tuple(sample), want)
    assert values == dict.fromkeys(("auc", "logloss", "ne", "calibration"), 0.5)
