"""What is run of a batch that an observer sees."""

from unittest import mock

import numpy as np
import pytest

from loka_jax.data import Batch
from loka_jax.train import observe
from loka_jax.train.tasks import LOG_LOSS
from tests.support import train as support


@pytest.mark.parametrize(
    "microbatches, devices, most, parts",
    [(1, 1, 99, 1), (3, 2, 99, 6), (1, 2, 99, 2), (1, 1, 8, 3), (1, 2, 11, 4)],
    ids=["whole", "microbatches of devices", "a device", "a third", "half of a device"],
)
def test_a_look_sees_a_part_of_a_batch_and_the_weight_of_all(
    monkeypatch, microbatches, devices, most, parts
):
    def seen(state, part, total_weight):
        return {"rows": len(part.dense), "of": total_weight, "state": state}

    made = mock.Mock(return_value=seen)
    monkeypatch.setattr(observe, "make_observe_step", made)
    monkeypatch.setattr(observe, "_MAX_EXAMPLES", most)
    run = mock.Mock(config=support.config(batch_size=24, microbatches=microbatches))
    run.placement.size = devices
    ones = np.ones(24, np.float32)
    batch = Batch(ones[:, None], np.zeros((24, 1), np.int32), ones, 0.5 * ones)
    found = observe.observe_step(run, "observer")("state", batch)
    assert found == {"rows": 24 // parts, "of": 12.0, "state": "state"}
    made.assert_called_once_with(run.planned, run.placement, "observer", LOG_LOSS)
    assert observe.parts_of(run) == parts
