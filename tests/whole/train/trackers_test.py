"""The trackers themselves: their libraries, on stores of this machine."""

import re

import pytest

from loka_jax.train.logs.trackers import Trackers
from tests.support.train import config, train

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
CONFIG = {"name": "small", "optim": {"lr": 0.1}, "rows": [1, 2]}


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return mlflow


def test_a_run_and_its_resumption_are_one_run_of_mlflow(tmp_path, mlflow):
    workdir = tmp_path / "my run"
    workdir.mkdir()
    trackers = Trackers(("mlflow",), pytest.fail)
    for step in (0, 1):
        trackers.open(workdir, CONFIG, step)
        trackers.log({"step": step + 1, "kind": "train", "a,b": 2.0**step})
    trackers.close(False)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("loka_jax")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "my run" and run.info.status == "FAILED"
    assert run.data.params == {"name": "small", "optim.lr": "0.1", "rows": "1 2"}
    history = client.get_metric_history(run.info.run_id, "train/a_b")
    assert [(x.step, x.value) for x in history] == [(1, 1.0), (2, 2.0)]


def test_weights_and_biases_and_tensorboard_leave_files_in_the_folder(tmp_path):
    wandb = pytest.importorskip("wandb")
    trackers = Trackers(("wandb", "tensorboard"), pytest.fail)
    for step in (0, 1):
        trackers.open(tmp_path, CONFIG, step)
        trackers.log({"step": step + 1, "kind": "train", "loss": 0.5})
    trackers.close(True)
    files = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    (name,) = {re.sub("run-|.wandb", "", file.name) for file in files}
    assert name == (tmp_path / "wandb.txt").read_text()
    kept = b"".join(file.read_bytes() for file in files)
    assert b"train/loss" in kept and b"0.5" in kept and wandb.run is None
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_training_run_is_tracked(tmp_path, mlflow):
    import dataclasses

    small = config(tmp_path / "run", epochs=1)
    run = dataclasses.replace(small.run, track=("mlflow",))
    code, said = train(dataclasses.replace(small, run=run))
    assert code == 0 and "left out" not in said
    (found,) = mlflow.MlflowClient().search_runs(["1"])
    assert found.info.status == "FINISHED"
    assert {"train/loss", "eval/ne", "final/ne"} <= set(found.data.metrics)
    assert found.data.params["optim.lr"] == "0.01"
