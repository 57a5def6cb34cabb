"""Scores are the same over how many devices the tables are spread."""

import dataclasses

import jax
import numpy as np
import pytest
from pyarrow import csv, parquet

import loka_jax
from experiments import predict
from loka_jax.train.mesh.devices import MeshConfig
from tests.support import predict as support
from tests.support import train as train_support
from tests.unit.predict import lists_test

needs_devices = pytest.mark.skipif(
    jax.device_count() < 4, reason="needs four devices: XLA_FLAGS of .ci/run"
)


# On one device, and on four: their checkpoints have other orders of rows.
@pytest.fixture(scope="module", params=[1, 4], ids="trained_on_{}".format)
def trained(request, tmp_path_factory):
    if jax.device_count() < request.param:
        pytest.skip("needs four devices: XLA_FLAGS of .ci/run")
    folder = tmp_path_factory.mktemp("trained")
    support.write(folder / "train.csv", support.rows(200))
    test = support.write(folder / "test.csv", support.rows(75, seed=1, users=14))
    config = support.config(folder, test=str(test))
    config = dataclasses.replace(
        config,
        model=config.model.clone(recipe="f32"),
        # The tables make two stacks.
        embedding=dataclasses.replace(config.embedding, dims=("user=8",)),
        mesh=MeshConfig(replicas=1, shards=request.param, wire_rows="f32"),
    )
    return support.train(folder, config)


@needs_devices
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_scores_are_those_of_the_evaluation(trained, shards):
    model = loka_jax.load(trained.workdir, shards=shards)
    spread = len(model._state.table[0].sharding.device_set)
    scores = model.scores(csv.read_csv(trained.test))
    expected = 1 / (1 + np.exp(-trained.logits.astype(np.float64)))
    # float32 sums of some 16 terms in another order.
    assert np.allclose(scores, expected, rtol=0, atol=1e-6)
    assert spread == shards
    assert np.ptp(scores) > 0.01  # of a model that has learned something


@needs_devices
def test_a_command_scores_over_devices(trained, tmp_path, capsys):
    out = tmp_path / "scores.csv"
    command = ["--workdir", str(trained.workdir), "--data.path", str(trained.test)]
    command += ["--out", str(out), "--mesh.shards", "4"]
    assert predict.main(command) == 0
    assert csv.read_csv(out).num_rows == 75


@pytest.mark.parametrize(
    "shards, reason",
    [
        (3, "--mesh.shards 3 must be a power of two"),
        (64, "error: --mesh.shards 64 are 64 devices, and there"),
    ],
)
def test_devices_that_cannot_be_are_refused(trained, tmp_path, capsys, shards, reason):
    out = tmp_path / "scores.csv"
    command = ["--workdir", str(trained.workdir), "--data.path", str(trained.test)]
    command += ["--out", str(out), "--mesh.shards", str(shards)]
    assert predict.main(command) == 2
    assert reason in capsys.readouterr().err and not out.exists()


@pytest.mark.slow
@needs_devices
def test_lists_in_tables_of_bfloat16_have_the_same_sums(tmp_path):
    parquet.write_table(lists_test.table(200), tmp_path / "train.parquet")
    rows = lists_test.table(75, seed=1, values=12)
    config = support.config(tmp_path, path="train.parquet", **lists_test.LISTS)
    config = dataclasses.replace(
        config,
        model=config.model.clone(recipe="f32"),
        embedding=dataclasses.replace(config.embedding, dim=12, dtype="bf16"),
        mesh=MeshConfig(replicas=1, shards=1, wire_rows="f32"),
    )
    assert train_support.train(config)[0] == 0
    alone, *others = (
        loka_jax.load(config.run.workdir, shards=shards).scores(rows)
        for shards in (1, 2, 4)
    )
    for scores in others:
        assert np.allclose(scores, alone, rtol=0, atol=1e-6)
    assert np.ptp(alone) > 0.01
