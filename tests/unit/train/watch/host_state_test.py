"""A run goes back to its newest checkpoint, with smaller steps and without the rows."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from loka_jax.data import Position
from loka_jax.dispatch.drift import SiteDrift
from loka_jax.optim import Plateau
from loka_jax.train.watch import host_state
from loka_jax.train.watch.guard import Diverged, Guard
from loka_jax.train.watch.host_state import Moment, Progress
from loka_jax.train.watch.scale_watch import ScaleWatch
from tests.support.loop import start_state


def progress_of(step, lr_scale=1.0, **options):
    options["plateau"] = Plateau(lr_scale=lr_scale)
    return Progress(step=step, position=Position(0, step, 3), **options)


SAVED = progress_of(8, 0.5, returns=("older",), seconds=3.0)
FAILED = progress_of(11, 0.25, returns=("one", "two"), seconds=9.0)


def gone_back(monkeypatch, saved="newest", progress=FAILED, wanted="go_back"):
    """Returns where a run goes back to."""
    rows = dataclasses.replace(start_state(), table="rows of then")
    then = Moment("run of then", rows, SAVED)
    monkeypatch.setattr(host_state, "restored", lambda *_: then)
    checkpoints = SimpleNamespace(newest=lambda: saved)
    loop = SimpleNamespace(on_divergence=wanted)
    run = SimpleNamespace(config=SimpleNamespace(loop=loop))
    return host_state.gone_back(Diverged("It grew."), checkpoints, run, progress)


def test_a_run_goes_back_with_half_the_rates_and_the_batches_to_come(monkeypatch):
    run, state, progress = gone_back(monkeypatch)
    assert (run, state.table) == ("run of then", "rows of then")
    # Half of the lower one, that of the divergence.
    assert float(state.lr_scale) == progress.plateau.lr_scale == 0.125
    said = "It grew. Went back to step 8, learning rates halved."
    plateau, returns = Plateau(lr_scale=0.125), ("one", "two", said)
    changed = dict(position=FAILED.position, plateau=plateau, returns=returns)
    assert progress == dataclasses.replace(SAVED, **changed)
    lower = progress_of(11, 0.75)
    assert gone_back(monkeypatch, progress=lower)[1].lr_scale == 0.25  # half of SAVED's


def test_a_run_does_not_go_back_unasked_without_a_checkpoint_or_often(monkeypatch):
    often = progress_of(11, returns=("one", "two", "three"))
    for options in ({"wanted": "stop"}, {"saved": None}, {"progress": often}):
        assert gone_back(monkeypatch, **options) is None


def test_progress_comes_back_from_json_as_it_was():
    full = dataclasses.replace(
        FAILED,
        plateau=Plateau(lr_scale=0.5, best=0.9, stalls=2),
        drift={
            "a": SiteDrift(looks=3, usual=[[1.0, None]], home=2),
            "b": SiteDrift(left={"choice": "xla bf16", "error": None, "speedup": 2}),
        },
        unsafe=("b",),
        broken=("c",),
        replanned=5,
        confirmed=5,
        guard=Guard(lowest=0.8, bad_windows=1),
        scale_watch=ScaleWatch(warnings=("w",), known=("k",), skipped=1, reads=2),
        days=({"day": 1},),
    )
    assert Progress.from_json(json.loads(json.dumps(dataclasses.asdict(full)))) == full


def test_progress_of_another_version_is_refused():
    saved = dataclasses.asdict(SAVED)
    missing = {k: v for k, v in saved.items() if k != "unsafe"}
    for other in (saved | {"position": None}, saved | {"other": 1}, missing):
        with pytest.raises(ValueError, match="no progress of this version .*use the v"):
            Progress.from_json(other)
