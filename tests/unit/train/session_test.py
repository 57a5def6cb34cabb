"""Whole runs: the same twice, the same after any stop, and what they leave behind."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax import jsonfile
from loka_jax.train import loop as loop_lib
from loka_jax.train import session
from loka_jax.train.build import Run
from loka_jax.train.checkpoints import manifest
from loka_jax.train.folder import folder_lock
from loka_jax.train.logs.progress import TrainingProgress
from loka_jax.train.loop import Loop
from loka_jax.train.watch.guard import TrainingFailed
from tests.support import train as support
from tests.support.train import config, digest, lines, summary, train

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    support.share_steps(monkeypatch)


STARTED = ["looking for a GPU", "checking the checkpoint"]
STARTED += ["preparing data, model and plan", "initializing"]


@pytest.fixture
def activities(monkeypatch):
    """Lists what the user is told to wait for."""
    found, plain = [], TrainingProgress.doing

    def spy(self, activity):
        found.append(activity)
        return plain(self, activity)

    monkeypatch.setattr(TrainingProgress, "doing", spy)
    return found


@pytest.fixture
def last_state(monkeypatch):
    """Lists the digest of the state at the end of each `Loop.train`."""
    found, plain = [], Loop.train

    def spy(self, stop):
        plain(self, stop)
        found.append(digest(self.state))

    monkeypatch.setattr(Loop, "train", spy)
    return found


def at_step(monkeypatch, step, action):
    """Runs `action` once, before a step."""
    plain = Loop.step

    def spy(self, taken):
        if self.progress.step == step:
            action(self)
        plain(self, taken)

    monkeypatch.setattr(Loop, "step", spy)


def files(workdir):
    return lines(workdir), lines(workdir, "scales.jsonl")


def fixed_evaluations(monkeypatch, nes, aucs=None):
    """Lets validation find these NEs and AUCs in turn."""
    found = zip(nes, aucs or [0.7] * len(nes), strict=True)

    def quality(run, state, dataset):
        ne, auc = next(found)
        return {"auc": auc, "logloss": ne / 2, "ne": ne, "calibration": 1.0}

    monkeypatch.setattr(loop_lib, "quality", quality)


@pytest.mark.slow
def test_the_same_configuration_leaves_the_same_lines(tmp_path, last_state):
    for name in "ab":
        train(config(tmp_path / name))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert last_state[0] == last_state[1]


@pytest.mark.slow
def test_another_seed_leaves_other_lines(tmp_path, last_state):
    for seed in (0, 1):
        train(config(tmp_path / str(seed), seed=seed, max_steps=3))
    assert files(tmp_path / "0") != files(tmp_path / "1")
    assert last_state[0] != last_state[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_stopped_by_signals_resumes_bit_for_bit(
    tmp_path, monkeypatch, last_state, number
):
    train(config(tmp_path / "whole", patience=50))
    stops = sorted(np.random.default_rng(number).choice(19, 2, replace=False))
    for i, step in enumerate(map(int, stops)):
        with monkeypatch.context() as patch:
            at_step(patch, step, lambda _: os.kill(os.getpid(), number))
            stopped = config(tmp_path / "cut", patience=50, resume=i > 0)
            assert train(stopped)[0] == 128 + number
        found = summary(tmp_path / "cut")
        assert (found["steps"], found["finished"]) == (step + 1, False)
        assert found["final_eval"] is None
    code, out = train(config(tmp_path / "cut", patience=50, resume=True))
    assert (code, f"Resuming at step {stops[1] + 1}." in out) == (0, True)
    assert last_state[-1] == last_state[0]
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    for name in ("steps", "examples", "best_valid", "final_eval", "final_step"):
        whole, cut = summary(tmp_path / "whole")[name], summary(tmp_path / "cut")[name]
        if name == "best_valid":
            whole["seconds"] = cut["seconds"] = None
        assert whole == cut, name


KILLED = """
import os, pathlib, sys
from loka_jax.train.loop import Loop
from tests.support import train as support
plain = Loop.step
def step(self, taken):
    if self.progress.step == 13:
        os.kill(os.getpid(), 9)
    plain(self, taken)
Loop.step = step
support.train(support.config(pathlib.Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(tmp_path, last_state):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "cut")],
        cwd=ROOT,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    train(config(tmp_path / "cut", resume=True))
    train(config(tmp_path / "whole"))
    assert last_state[0] == last_state[1]
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_run_that_ended_resumes_to_the_same_summary(tmp_path, activities):
    train(config(tmp_path, max_steps=4))
    before = summary(tmp_path)
    evaluated = ["evaluating", "writing the report"]
    assert activities[:4] == STARTED
    assert activities[-3:] == ["saving", *evaluated]
    activities.clear()
    assert train(config(tmp_path, max_steps=4, resume=True))[0] == 0
    assert summary(tmp_path)["final_eval"] == before["final_eval"]
    assert activities == [*STARTED, "reading the checkpoint", "saving", *evaluated]


def test_a_resumed_run_may_be_longer(tmp_path, last_state):
    train(config(tmp_path / "a", max_steps=4))
    train(config(tmp_path / "a", max_steps=8, resume=True))
    train(config(tmp_path / "b", max_steps=8))
    assert last_state[1] == last_state[2]


def test_resuming_where_nothing_was_saved_starts_over(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        at_step(patch, 0, lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config(tmp_path, max_steps=3))
    code, out = train(config(tmp_path, max_steps=3, resume=True))
    assert (code, "Nothing was saved yet" in out) == (0, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "module, name",
    [
        (folder_lock, "_is_at"),  # the folder has just been made
        (session, "_open_folders"),
        (session, "build"),
        (session, "Loop"),  # the last that is made before the first step
    ],
)
def test_a_signal_before_the_first_step_ends_at_once_and_leaves_nothing(
    tmp_path, monkeypatch, module, name, number
):
    plain = getattr(module, name)

    def signalled(*args, **options):
        os.kill(os.getpid(), number)
        return plain(*args, **options)

    monkeypatch.setattr(module, name, signalled)
    monkeypatch.setattr(Loop, "train", lambda *_: pytest.fail("went on"))
    handler = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        train(config(tmp_path / "runs" / "run"))
    assert ended.value.code == 128 + number
    assert not (tmp_path / "runs").exists()
    assert signal.getsignal(number) is handler


@pytest.mark.slow
def test_training_learns(tmp_path):
    data = dataclasses.replace(support.DATA, examples=6400, eval_examples=2048)
    train(config(tmp_path, data=data, epochs=1, eval_every=50))
    losses = [x["loss"] for x in lines(tmp_path) if x["kind"] == "train"]
    found = summary(tmp_path)
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.02
    assert found["final_eval"]["auc"] > 0.65
    assert found["best_possible_ne"] < found["final_eval"]["ne"] < 1


def test_where_nothing_can_be_learned_no_gap_is_printed(tmp_path):
    data = dataclasses.replace(support.DATA, signal=0.0)
    code, out = train(config(tmp_path, data=data, max_steps=2))
    assert code == 0 and summary(tmp_path)["best_possible_ne"] == pytest.approx(1)
    assert "gap closed" not in out


def test_early_stopping_ends_the_run_and_keeps_the_best_state(
    tmp_path, monkeypatch, last_state
):
    best, plain = [], Loop.best_state
    monkeypatch.setattr(Loop, "best_state", lambda x: best.append(plain(x)) or best[-1])
    for name, steps in (("early", None), ("best", 4)):
        fixed_evaluations(monkeypatch, [0.9, 0.8, 0.85, 0.86])
        train(config(tmp_path / name, patience=2, eval_every=2, max_steps=steps))
    found = summary(tmp_path / "early")
    assert (found["steps"], found["final_step"]) == (8, 4)
    assert found["best_valid"]["step"] == 4
    _, state, progress = best[0]
    assert (progress.step, digest(state)) == (4, last_state[1])


@pytest.mark.parametrize(
    "best_by, step, name",
    [("ne", 4, "NE"), ("logloss", 4, "log loss"), ("auc", 8, "AUC")],
)
def test_the_best_state_is_chosen_by_the_measure(
    tmp_path, monkeypatch, best_by, step, name
):
    # The AUC still grows where the loss is long past its best.
    fixed_evaluations(monkeypatch, [0.9, 0.8, 1.2, 1.4, 1.5], [0.6, 0.7, 0.71, 0.72, 0])
    base = config(tmp_path, patience=50, eval_every=2, max_steps=8)
    optim = dataclasses.replace(base.optim, best_by=best_by)
    code, out = train(dataclasses.replace(base, optim=optim))
    found = summary(tmp_path)
    assert (code, found["final_step"], found["best_valid"]["step"]) == (0, step, step)
    assert found["final_state"] == f"step {step}, the best by {name}"
    assert f"({found['final_state']})" in out


def test_without_patience_the_last_state_is_evaluated(tmp_path, monkeypatch):
    fixed_evaluations(monkeypatch, [0.8, 0.9])
    _, out = train(config(tmp_path, eval_every=2, max_steps=4))
    assert summary(tmp_path)["final_state"] == "step 4, the last"
    assert "(step 4, the last)" in out


def test_stalls_lower_the_learning_rate(tmp_path, monkeypatch):
    fixed_evaluations(monkeypatch, [0.8, 0.9, 0.75, 0.9])
    train(config(tmp_path, patience=3, eval_every=2, log_every=1, max_steps=8))
    rates = [x["lr"] for x in lines(tmp_path) if x["kind"] == "train"]
    assert rates[2:] == pytest.approx([0.01] * 2 + [0.001] * 4)


def test_a_run_that_stopped_early_takes_no_step_when_resumed(tmp_path, monkeypatch):
    fixed_evaluations(monkeypatch, [0.8, 0.9])
    train(config(tmp_path, patience=1, eval_every=2))
    train(config(tmp_path, patience=1, eval_every=2, resume=True))
    assert summary(tmp_path)["steps"] == 4


def test_a_best_state_from_after_the_resumed_step_is_dropped(tmp_path, monkeypatch):
    options = dict(patience=9, eval_every=2, save_every=100, max_steps=6)

    def die(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        fixed_evaluations(patch, [0.9, 0.8])
        at_step(patch, 5, die)
        with pytest.raises(KeyboardInterrupt):
            train(config(tmp_path, **options))
    assert [x.name for x in (tmp_path / "best").iterdir()] == ["4"]
    fixed_evaluations(monkeypatch, [0.7, 0.9, 0.9])
    train(config(tmp_path, **options, resume=True))  # from the start: nothing was saved
    assert summary(tmp_path)["final_step"] == 2


@pytest.fixture
def taken(monkeypatch):
    """Lists the kinds of the steps that were taken."""
    found, plain = [], Run.train_step

    def spy(self, *, scales_initialized, **how):
        found.append("step" if scales_initialized else "first_step")
        return plain(self, scales_initialized=scales_initialized, **how)

    monkeypatch.setattr(Run, "train_step", spy)
    return found


def test_the_guard_for_first_steps_is_dropped_once_initialized(tmp_path, taken):
    train(config(tmp_path, max_steps=4))
    assert taken == ["first_step"] + ["step"] * 3


def test_the_guard_for_first_steps_is_dropped_in_the_end(tmp_path, taken, monkeypatch):
    monkeypatch.setattr(loop_lib, "scales_initialized", lambda _: False)
    train(config(tmp_path, max_steps=18))
    assert taken == ["first_step"] * 16 + ["step"] * 2


def test_rates_leave_out_the_steps_that_compile(tmp_path, monkeypatch):
    now, plain = [0.0], Loop.step
    watch = types.SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("loka_jax.train.logs.clock.time", watch)

    def step(self, taken):
        if self.progress.step == 0:
            jax.jit(lambda x: x + tmp_path.stat().st_ino)(1.0)  # like no other program
            now[0] += 1
        plain(self, taken)
        now[0] += 0.01

    monkeypatch.setattr(Loop, "step", step)
    # The last step compiles what looks at scales.
    train(config(tmp_path, max_steps=7, log_every=6, eval_every=7))
    (line, *_) = jsonfile.read_lines(tmp_path / "metrics.jsonl")
    assert line["seconds"] == pytest.approx(1.06)
    for found in (line, summary(tmp_path)):
        assert found["examples_per_second"] == pytest.approx(32 / 0.01)


def test_the_final_evaluation_is_broken_down(tmp_path):
    train(config(tmp_path, max_steps=4, batch_size=48))  # 64 examples: 1 1/3 batches
    found = jsonfile.read(tmp_path / "evaluation.json")
    assert isinstance(found, dict) and found["split"] == "test"
    assert found["examples"] == 64 and len(found["columns"]) == 4
    scores = np.load(tmp_path / "scores.npy")
    logits, labels = scores["logits"].astype(np.float64), scores["labels"]
    logloss = np.mean(np.logaddexp(0, np.where(labels == 1, -logits, logits)))
    final = summary(tmp_path)["final_eval"]
    assert final["logloss"] == pytest.approx(logloss, rel=1e-5)
    counted = sum(row["count"] for row in found["calibration_curve"])
    assert counted == len(labels) == 64


@pytest.mark.parametrize("log_every", [2, 50])
def test_too_many_skipped_steps_in_a_row_end_the_run(tmp_path, monkeypatch, log_every):
    def poison(loop):
        params = jax.tree.map(lambda x: x * jnp.nan, loop.state.params)
        loop.state = dataclasses.replace(loop.state, params=params)

    at_step(monkeypatch, 0, poison)
    options = {"log_every": log_every, "eval_every": 4, "max_skipped_steps": 4}
    sentence = (
        r"the last 4 steps up to step 4 were skipped, because their loss or gradients "
        r"were not finite: lower --optim.lr or --optim.rows-lr, or set "
    )
    with pytest.raises(TrainingFailed, match=sentence):
        train(config(tmp_path, **options))
    assert not any((tmp_path / "checkpoints").glob("[0-9]*"))


def test_a_checkpoint_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest, "write", full)
    at_step(monkeypatch, 2, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(OSError, match="step 3 could not be saved in"):
        train(config(tmp_path))
    assert not (tmp_path / "summary.json").exists()
