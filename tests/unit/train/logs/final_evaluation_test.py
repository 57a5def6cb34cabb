import numpy as np
import pytest

from loka_jax.data import Position
from loka_jax.train.evaluation import evaluate
from loka_jax.train.logs import final_evaluation
from loka_jax.train.logs.final_evaluation import evaluate_finally
from tests.support import train as support


@pytest.fixture(scope="module")
def run():
    return support.build(support.config(batch_size=16))  # four batches


@pytest.mark.parametrize("most, batches", [(64, [0, 1, 2, 3]), (32, [0, 2]), (1, [0])])
def test_a_sample_is_of_batches_at_equal_distances(run, monkeypatch, most, batches):
    state, valid = run.init(), run.splits.valid
    monkeypatch.setattr(final_evaluation, "SAMPLE", most)
    values, samples = evaluate_finally(run, state, valid)
    (sample,) = samples.values()
    whole = evaluate(run, state, valid)
    rows = np.concatenate([np.arange(16 * i, 16 * i + 16) for i in batches])
    assert np.array_equal(sample.logits, whole.logits[rows])
    assert np.array_equal(sample.labels, whole.labels[rows])
    batch = valid.batch(Position(0, 0, 0), 64, shuffle=False)
    assert np.array_equal(sample.ids, np.asarray(batch.ids)[rows])
    assert values["auc"] == whole.values["auc"]


def test_without_finite_logits_there_is_no_sample(run, monkeypatch):
    valid = run.splits.valid
    broken = evaluate(run, run.init(), valid)
    values = broken.values | {"non_finite": 1}
    monkeypatch.setattr(
        final_evaluation, "evaluate", lambda *_: broken._replace(values=values)
    )
    assert evaluate_finally(run, run.init(), valid).samples == {}
