"""The sample of a final evaluation: batches at equal distances, with their ids."""

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import pytest

from loka_jax.data import Position, open_data
from loka_jax.train.evaluation import Evaluated
from loka_jax.train.logs import final_evaluation
from loka_jax.train.logs.final_evaluation import evaluate_finally
from loka_jax.train.logs.log_lines import chosen
from tests.support import train as support

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
        found = Evaluated(VALUES | values, rows, rows % 2, weights)
        monkeypatch.setattr(final_evaluation, "evaluate", lambda *_: found)
        return evaluate_finally(run, None, valid), valid

    return evaluated


@pytest.mark.parametrize("most, batches", [(64, [0, 1, 2, 3]), (32, [0, 2]), (1, [0])])
def test_a_sample_is_of_batches_at_equal_distances(
    finally_of, monkeypatch, most, batches
):
    monkeypatch.setattr(final_evaluation, "SAMPLE", most)
    (values, samples), valid = finally_of(non_finite=0)
    (sample,) = samples.values()
    rows = np.concatenate([np.arange(SIZE * i, SIZE * i + SIZE) for i in batches])
    rows = rows[rows < ROWS]
    batch = valid.batch(Position(0, 0, 0), 4 * SIZE, shuffle=False)
    want = (rows, rows % 2, np.ones(len(rows)), np.asarray(batch.ids)[rows])
    jax.tree.map(np.testing.assert_array_equal, tuple(sample), want)
    assert values == chosen(VALUES)
