"""Scores are the same over how many devices the tables are spread."""

import dataclasses

import jax
import numpy as np
import pytest
from pyarrow import csv

import loka_jax
from loka_jax.train.mesh.devices import MeshConfig
from tests.support import predict as support


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_scores_are_those_of_the_evaluation(tmp_path):
    config = support.config(tmp_path, test=support.write_both(tmp_path))
    config = dataclasses.replace(
        config,
        model=config.model.clone(recipe="f32"),
        # The tables make two stacks.
        embedding=dataclasses.replace(config.embedding, dims=("user=8",)),
        mesh=MeshConfig(replicas=1, shards=4, wire_rows="f32"),
    )
    trained = support.train(config)
    expected = support.sigmoid(trained.logits)
    for shards in (1, 2, 4):
        model = loka_jax.load(trained.workdir, shards=shards)
        assert len(model._state.table[0].sharding.device_set) == shards
        scores = model.scores(csv.read_csv(trained.test))
        # float32 sums of some 16 terms in another order.
        assert np.allclose(scores, expected, rtol=0, atol=1e-6)
        assert np.ptp(scores) > 0.01  # of a model that has learned something
    for shards, said in ((3, "must be a power of two"), (64, "are 64 devices")):
        with pytest.raises(ValueError, match=f"--mesh.shards {shards} {said}"):
            loka_jax.load(trained.workdir, shards=shards)
