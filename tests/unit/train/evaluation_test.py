"""An evaluation sees every row once, in order."""

import types
from typing import Any

import jax
import numpy as np

from loka_jax.train import evaluation, metrics
from tests.support import train as support
from tests.support.linear import make_batch
from tests.support.loop import start_state


def test_every_row_of_a_data_set_is_seen_once_and_in_order(monkeypatch):
    batches = [make_batch(seed, size=8) for seed in range(3)]
    batches[2].weights[5:] = 0
    alive = []
    schema = types.SimpleNamespace(labels=("label",))
    dataset: Any = types.SimpleNamespace(schema=schema, num_batches=lambda size: 3)
    run: Any = types.SimpleNamespace(
        config=support.config(),
        planned=types.SimpleNamespace(is_delayed=False),
        read=lambda data, step: batches[step],
        fetched=jax.device_get,
    )
    update = jax.jit(metrics.update)

    def eval_step(model):
        assert model is run.planned

        def step(state, seen, batch):
            logits = batch.dense[:, 0]
            return update(seen, logits, batch.labels, batch.weights), logits

        return step

    run.eval_step = eval_step
    monkeypatch.setattr(evaluation.watchdog, "alive", lambda: alive.append(1))
    found = evaluation.evaluate(run, start_state(), dataset)
    columns = [np.concatenate(x) for x in zip(*(b[:4] for b in batches), strict=True)]
    np.testing.assert_array_equal(found.logits, columns[0][:, 0])
    np.testing.assert_array_equal(found.labels, columns[2])
    np.testing.assert_array_equal(found.weights, columns[3])
    assert found.values["count"] == 21 and len(alive) == 3
    auc = metrics.auc(found.logits, found.labels, found.weights)
    assert found.values["auc"] == auc
