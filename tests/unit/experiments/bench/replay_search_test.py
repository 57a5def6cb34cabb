"""Replays of searches of a space whose speeds are known."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.bench import replay_search as replays
from loka_jax.search.history import History
from tests.support.search import space

pytest.importorskip("optuna")


def test_all_methods_are_replayed_and_the_file_tells_how_they_did(tmp_path, capsys):
    file, out = tmp_path / "space.json", tmp_path / "replays.json"
    points = space(memory=0.7)[::3]
    about = {"config": {}, "versions": {}, "trials": tuple(points)}
    History(file, about).add(points[0])  # measured twice
    methods = ("planner", "tpe", "tuned", "loka", "earlier")
    options = replays.Arguments(
        space=file, out=out, earlier=(file,), replays=2, trials=5, methods=methods
    )
    assert replays.main(options) == 0
    told = json.loads(out.read_text())
    assert told["points"] == len(points)
    assert told["failed"] == sum(not x.is_ok for x in points) > 0
    found = told["methods"]
    assert set(found) == {"random", *methods}
    regret = {name: one["regret"]["5"] for name, one in found.items()}
    assert regret["loka"] < 0.02 < min(regret["random"], regret["tpe"])
    assert found["random"]["score"] == pytest.approx(0)
    assert found["loka"]["score"] > 0.4
    assert "loka     regret after 1:" in capsys.readouterr().out


def test_regret_is_that_of_the_true_speed_of_what_measured_best():
    ok = [x for x in space(noise=0.0) if x.is_ok]
    fast, slow = max(ok, key=lambda x: x.speed), min(ok, key=lambda x: x.speed)
    lucky = dataclasses.replace(slow, rates=(2 * fast.speed,))
    failed = dataclasses.replace(fast, status="memory", rates=())
    regret = replays.regrets(ok, [failed, fast, lucky], 4)
    loss = 1 - slow.speed / fast.speed
    np.testing.assert_allclose(regret, [1, 0, loss, loss])


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="--methods best must be of loka"):
        replays.chooser("best", space()[:3], (), 0)
