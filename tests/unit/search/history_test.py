"""The file of trials: shared, never without what it had, and of one search."""

import errno
import json

import pytest

from loka_jax import jsonfile
from loka_jax.search.history import History, Outcome, Trial, read_trials

ABOUT = {"config": {"seed": 0}, "versions": {"device_kind": "cpu", "jax": "0.11.2"}}


def trial(value, **more):
    told = {"status": "ok", "rates": (90.0, 100.0, 700.0)} | more
    return Trial(choices={"recipe": value}, batch_size=64, us={"dense": 1.0}, **told)


def test_several_searches_share_a_file(tmp_path):
    path = tmp_path / "search" / "trials.json"
    one, other = History(path, ABOUT), History(path, ABOUT)
    failed = trial("fp8", status="memory", rates=(), why="RESOURCE_EXHAUSTED")
    assert one.add(trial("bf16")) == (trial("bf16"),)
    assert other.add(failed) == (trial("bf16"), failed) == one.trials()
    assert read_trials(path) == one.trials()
    assert [x.speed for x in one.trials() if x.is_ok] == [100.0]


def test_trials_of_something_else_are_refused(tmp_path):
    path = tmp_path / "trials.json"
    History(path, ABOUT).add(trial("bf16"))
    with pytest.raises(ValueError, match=r"other runs \(config.seed: saved 0, now 1"):
        History(path, ABOUT | {"config": {"seed": 1}})
    other = {"device_kind": "NVIDIA H200"}
    with pytest.raises(ValueError, match="device: saved 'cpu', now 'NVIDIA H200'"):
        History(path, ABOUT | {"versions": other})
    path.write_text(path.read_text().replace('"status": "ok"', '"status": "fine"'))
    with pytest.raises(ValueError, match="holds no trials of a search: .*status"):
        read_trials(path)
    with pytest.raises(ValueError, match="cannot read"):
        read_trials(tmp_path / "none.json")


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "trials.json"
    history = History(path, ABOUT)
    history.add(trial("bf16"))
    before = path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(jsonfile.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            history.add(trial("fp8"))
    assert path.read_bytes() == before
    assert [*tmp_path.glob("*.tmp"), *tmp_path.glob(".*.tmp")] == []
    assert len(history.add(trial("fp8"))) == 2
    assert len(json.loads(path.read_text())["trials"]) == 2


def test_one_line_in_twenty_that_was_disturbed_leaves_the_speed():
    rates = [100.0 + i % 3 for i in range(19)] + [31.0]
    assert Outcome(status="ok", rates=tuple(rates)).speed == 101.0
