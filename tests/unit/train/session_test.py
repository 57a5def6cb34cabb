"""What a session decides and in which order, without a run that is trained."""

import dataclasses
import io
import os
import pathlib
import shutil
import signal
import types
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from loka_jax.train import loop as loop_lib
from loka_jax.train import session
from loka_jax.train import summary as summary_lib
from loka_jax.train.checkpoints.manifest import Saved
from loka_jax.train.config import ProbeOptions
from loka_jax.train.folder import workdir
from loka_jax.train.folder.source_run import SourceRun
from loka_jax.train.loop import Loop
from tests.support import train as support
from tests.support.loop import StandInCheckpoints, StandInRun, Steps, start_state
from tests.support.train import config

SAVED = Saved(4, {"plan": {"a": 1}, "data": {"rows": 148}}, {"params/w": {}})


SOURCE = SourceRun(pathlib.Path("a"), config(), StandInCheckpoints("a", []), SAVED)


@pytest.fixture
def sessions(monkeypatch):
    """Lets sessions run with stand-ins for data, which keep no encoding, and steps."""
    found = types.SimpleNamespace(
        built_with=[], every=[], rows=148, judged=[], room_for=[]
    )

    def build(config, plan, say, base):
        found.built_with.append((plan, base))
        found.every.append((config.probe.every, config.probe.begin))
        run = StandInRun(config, [], 8)
        vars(run.splits).update(identity={"rows": found.rows}, encoding_digest=None)
        return run

    values = dict(auc=0.7, logloss=0.5, calibration=1.0)
    monkeypatch.setattr(session, "build", build)
    monkeypatch.setattr(session, "print_run", lambda *_: None)
    monkeypatch.setattr(session, "write_run_page", lambda page, run: page.touch())
    evaluate = lambda run, state, _: values | {"ne": NES[int(state.step)]}  # noqa: E731
    monkeypatch.setattr(loop_lib, "evaluate", evaluate)
    monkeypatch.setattr(loop_lib, "logged", lambda values: values)
    monkeypatch.setattr(loop_lib.confirm, "is_due", lambda *_: False)

    def evaluate_finally(run, state, rows, calibration=None):
        found.judged.append((int(state.step), rows))
        return values | {"ne": float(state.step)}, {}

    monkeypatch.setattr(summary_lib, "evaluate_finally", evaluate_finally)
    room = lambda folders, state: found.room_for.append(len(folders))  # noqa: E731
    monkeypatch.setattr(session, "require_space", room)
    return found


NES = {2: 0.9, 4: 0.7, 6: 0.8, 8: 0.85}


def train(config):
    out = io.StringIO()
    return session.train(config, [], Console(file=out, width=120)), out.getvalue()


@pytest.mark.parametrize(
    "module, name, number",
    [
        (workdir, "_is_at", signal.SIGTERM),  # the folder has just been made
        (session, "build", signal.SIGINT),
        (session, "Loop", signal.SIGTERM),  # the last before the first step
    ],
)
def test_a_signal_before_the_first_step_ends_at_once_and_leaves_nothing(
    tmp_path, monkeypatch, sessions, module, name, number
):
    plain, handler = getattr(module, name), signal.getsignal(number)

    def signalled(*args, **options):
        os.kill(os.getpid(), number)
        return plain(*args, **options)

    monkeypatch.setattr(module, name, signalled)
    monkeypatch.setattr(Loop, "train", lambda *_: pytest.fail("went on"))
    with pytest.raises(SystemExit) as ended:
        train(config(tmp_path / "runs" / "run"))
    assert ended.value.code == 128 + number
    assert not (tmp_path / "runs").exists()
    assert signal.getsignal(number) is handler


OPTIONS = dict(eval_every=2, log_every=1, patience=9)


def steps_in(folder):
    return sorted(int(path.name) for path in folder.glob("[0-9]*"))


def test_a_session_leaves_a_run_that_was_judged_by_its_best_state(tmp_path, sessions):
    done, said = train(config(tmp_path, **OPTIONS))
    assert (done.exit_code, done.workdir, int(done.state.step)) == (0, tmp_path, 8)
    assert steps_in(tmp_path / "checkpoints") == [6, 8]
    assert steps_in(tmp_path / "best") == [4]
    found = support.summary(tmp_path)
    assert (found["finished"], found["steps"], found["final_step"]) == (True, 8, 4)
    assert (found["final_eval"]["ne"], found["best_valid"]["step"]) == (4, 4)
    assert sessions.judged == [(4, "the test rows")]
    assert sessions.room_for == [2]  # the newest states, and the best
    assert "step 4, the best by NE" in said and (tmp_path / "report.html").exists()
    with pytest.raises(ValueError, match="holds a run already"):
        train(config(tmp_path, **OPTIONS))


def test_a_stopped_session_goes_on_where_it_was(tmp_path, monkeypatch, sessions):
    train(config(tmp_path / "whole", **OPTIONS))
    plain, cut = Steps.__call__, tmp_path / "cut"

    def stop(self, state, *batches):
        if int(state.step) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, state, *batches)

    with monkeypatch.context() as patch:
        patch.setattr(Steps, "__call__", stop)
        done, said = train(config(cut, **OPTIONS))
    assert done.exit_code == 143 and "Stopped at step 5, and saved" in said
    found = support.summary(cut)
    assert (found["finished"], found["final_eval"], found["steps"]) == (False, None, 5)
    resumed = config(cut, resume=True, **OPTIONS)
    sessions.rows = 99
    with pytest.raises(ValueError, match="the data differ .*rows: saved 148, now 99"):
        train(resumed)
    sessions.rows = 148
    shutil.copytree(cut / "best" / "4", cut / "best" / "9")  # a step taken again
    done, said = train(resumed)
    assert done.exit_code == 0 and "Resuming at step 5." in said
    assert sessions.built_with[-1] == ({}, None)  # the plan that was saved
    assert support.lines(tmp_path / "whole") == support.lines(cut)
    both = [support.summary(tmp_path / name) for name in ("whole", "cut")]
    for name in ("final_eval", "final_step", "examples", "steps"):
        assert both[0][name] == both[1][name]
    assert steps_in(cut / "best") == [4]


def test_a_session_may_go_on_from_another_run(tmp_path, monkeypatch, sessions):
    def begin(loop, *_):
        loop.progress = dataclasses.replace(loop.progress, days=({"data": "a.csv"},))

    bad_ids = dataclasses.replace(start_state(), bad_ids=jnp.asarray(np.int32(3)))
    monkeypatch.setattr(SourceRun, "base", lambda _: "its encoding")
    returned = dict(source_of=SOURCE, initial_state=bad_ids)
    for name, value in returned.items():
        monkeypatch.setattr(session.next_day, name, lambda *_, value=value: value)
    monkeypatch.setattr(session.next_day, "begin", begin)
    train(config(tmp_path, seed=5, **OPTIONS | {"patience": None}))
    found = support.summary(tmp_path)
    assert (found["final_state"], found["bad_ids"]) == ("step 8, the last", 3)
    assert sessions.room_for == [1]
    assert sessions.built_with == [({"a": 1}, "its encoding")]
    first, *others = support.lines(tmp_path)
    assert (first["kind"], first["step"], first["data"]) == ("day", 0, "a.csv")
    assert len(others) == 8 + 4  # its own steps, and their evaluations


@pytest.mark.parametrize("asked, observed", [(None, (None, 128)), (7, (7, None))])
def test_a_run_resumes_with_the_plan_and_the_observation_of_its_checkpoint(
    sessions, asked, observed
):
    run = dataclasses.replace(config(), probe=ProbeOptions(every=asked))
    meta = SAVED.meta | {"config": {"probe": {"begin": 128, "recipes": []}}}
    with_probe = dataclasses.replace(SAVED, leaves={"probe/site": None}, meta=meta)
    without_plan = dataclasses.replace(SAVED, meta={"data": {"rows": 148}})
    for saved in (SAVED, with_probe, without_plan):
        start = SOURCE._replace(saved=saved, is_resumed=True)
        session._build(run, None, mock.MagicMock(), start)
    session._build(run, None, mock.MagicMock(), None)
    assert sessions.built_with == [({"a": 1}, None)] * 2 + [({}, None), (None, None)]
    own = asked, None
    assert sessions.every == [own, observed, own, own]


def test_options_that_decide_what_a_run_learns_may_not_change():
    may = {"loop.epochs", "mesh", "data.path", "loop.steps_per_call"}
    fixed = {"loop.batch_size", "loop.microbatches", "loop.eval_every", "optim", "seed"}
    fixed |= {"loop", "data", "probe", "probe.every"}
    assert may <= set(session._MAY_CHANGE) and not fixed & set(session._MAY_CHANGE)
