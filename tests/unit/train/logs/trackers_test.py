"""What trackers are given, and what a user is told of one; a stand-in takes it."""

import importlib.util

import pytest

from loka_jax.train.folder.record import SCALES, RunRecord
from loka_jax.train.logs import trackers
from loka_jax.train.logs.trackers import Tracker, Trackers

CONFIG = {"name": "small"}


@pytest.fixture
def taken(monkeypatch):
    """A list of what a stand-in for W&B takes; a step of 99 breaks it."""
    taken = []

    def open_(workdir, config, step):
        def log(numbers, step):
            if step == 99:
                raise ConnectionError("no\nserver")
            taken.append((step, numbers))

        taken.append(("open", workdir.name, config, step))
        return Tracker(log, lambda is_well: taken.append(("close", is_well)))

    monkeypatch.setitem(trackers._TRACKERS, "wandb", (open_, "json", "wandb"))
    return taken


def record(workdir, say, **options):
    tracked = Trackers(("wandb",), say)
    return RunRecord(workdir, config=CONFIG, trackers=tracked, **options)


def test_numbers_of_metrics_and_of_the_end_are_tracked(tmp_path, taken):
    with record(tmp_path / "run", print) as run:
        run.start(-1)
        values = {"loss": 0.5, "ne": None, "ok": True, "auc": float("nan")}
        run.log({"step": 3, "kind": "train"} | values)
        run.log({"step": 3, "site/lhs": 1.0}, SCALES)
        run.log({"step": 4, "kind": "eval", "tasks": {"buy": {"ne": 0.9}}})
        run.truncate(3)
        run.track_final({"ne": 0.75, "split": "test"}, 4)
    assert taken == [
        ("open", "run", CONFIG, -1),
        (3, {"train/loss": 0.5}),
        (4, {"eval/tasks.buy.ne": 0.9}),
        ("close", True),
        ("open", "run", CONFIG, 3),
        (4, {"final/ne": 0.75}),
        ("close", True),
    ]


def test_a_failed_run_is_told_and_others_track_nothing(tmp_path, taken):
    with pytest.raises(ZeroDivisionError), record(tmp_path, print) as run:
        run.start(-1)
        raise ZeroDivisionError
    assert taken[-1] == ("close", False)
    taken.clear()
    with record(tmp_path, print, writes=False) as run:
        run.start(-1)
        run.log({"step": 1, "kind": "train", "loss": 1.0})
        run.track_final({"ne": 1.0}, 1)
    assert taken == []


def test_a_tracker_that_fails_later_is_left_out_and_said_once(tmp_path, taken):
    said = []
    with record(tmp_path, said.append) as run:
        run.start(-1)
        for step in (99, 100):
            run.log({"step": step, "kind": "train", "loss": 1.0})
    assert said == ["wandb failed and is left out: ConnectionError: no server."]
    assert taken == [("open", tmp_path.name, CONFIG, -1)]
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2


def test_a_tracker_that_cannot_begin_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no store")

    monkeypatch.setitem(trackers._TRACKERS, "mlflow", (refuse, "json", "mlflow"))
    tracked = Trackers(("mlflow",), print)
    with pytest.raises(ValueError, match=r"mlflow cannot begin \(OSError: no store\)"):
        tracked.open(tmp_path, CONFIG, -1)
    with pytest.raises(ValueError, match="mlfow must be one of tensorboard, mlflow"):
        Trackers(("mlfow",), print)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"mlflow needs json: install loka-jax\[mlf"):
        Trackers(("mlflow",), print)
