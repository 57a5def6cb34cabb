"""When a run counts as diverged or failed, and what is named as the cause."""

from types import SimpleNamespace

import numpy as np
import pytest

from loka_jax import nn
from loka_jax.data import Batch
from loka_jax.models import Dlrm
from loka_jax.train import metrics
from loka_jax.train.metrics import CappedNe
from loka_jax.train.watch import guard
from loka_jax.train.watch.guard import (
    ABSURD,
    ENOUGH,
    LIMIT,
    Diverged,
    Guard,
    TrainingFailed,
)

RARE = dict(of_half=88.0)  # at 0.1 % of clicks predicting one half has an NE of 88
COLD, FEW = dict(is_warm=False), dict(rarer=ENOUGH - 1)
BAD, INF, NAN = 1.01 * LIMIT, np.inf, np.nan


@pytest.mark.parametrize(
    "windows, options, bad",
    [
        ((0.8, 2.0, 0.8, 3.0, 0.8), {}, 0),  # single batches of outliers
        ((0.9, LIMIT, LIMIT), {}, 0),  # at most that times one half's
        ((1.4, 1.4 * LIMIT, 1.4 * LIMIT), {}, 0),  # at most that times the lowest
        ((0.7, 0.8, BAD), {}, 1),
        ((2.9, 2.5, 2.0), {}, 0),  # a bad start that gets better
        ((1.4, 1.4 * BAD, 1.4 * BAD), {}, 2),
        ((NAN, INF), {}, 2),
        ((0.9, 5.0, None, 5.0), {}, 2),  # a window without examples
        ((22.0, 22 * BAD, 22 * BAD), RARE, 2),
        ((22.0, 22 * BAD, 22 * BAD), RARE | COLD, 0),
        ((0.9, ABSURD, ABSURD), COLD, 0),
        ((0.9, ABSURD + 1, ABSURD + 1), COLD, 2),
        ((0.9, 2.0, 2.5), FEW, 0),  # an NE by chance
        ((NAN, ABSURD + 1), FEW, 2),
    ],
)
def test_two_bad_windows_in_a_row_are_divergence(windows, options, bad):
    seen, given = Guard(), {"is_warm": True, "of_half": 1.0, "rarer": ENOUGH} | options
    is_warm = given.pop("is_warm")
    for ne in windows:
        seen = seen.after(CappedNe(ne, **given), is_warm=is_warm)
    assert seen.bad_windows == bad
    known = [ne for ne in windows if ne is not None and np.isfinite(ne)]
    lowest = min(known, default=None)
    assert seen.lowest == (lowest if given["rarer"] >= ENOUGH else None)


COLUMNS = ("price", "age", "height")
FP8 = nn.Planned(Dlrm(recipe="fp8_tensorwise"))


def batch_of(dense=((1.0, -2.0, 3.0), (np.nan, 1e4, 0.5))):
    dense = np.float32(dense)
    ones = np.ones(len(dense), np.float32)
    return Batch(dense, np.zeros((len(dense), 1), np.int32), ones, ones)


def cause(*, by_fp8=0.7, by_bf16=0.7, batch=None):
    """Returns the cause that is named where models have these losses, of two tasks."""
    batch = batch or batch_of()

    def eval_step_of(planned):
        loss = by_bf16 if planned.model.recipe == "bf16" else by_fp8

        def step(state, seen, given):
            assert given is batch and not np.any(seen.count)
            tasks = np.float32([[0.1, 0.0], [loss, 0.0]])
            ones = np.ones(2, np.int32)
            return seen._replace(count=ones, clicks=ones, loss=tasks), None

        return step

    state = SimpleNamespace(metrics=metrics.init(tasks=2))
    return guard.likely_cause(FP8, eval_step_of, state, batch, COLUMNS)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"batch": batch_of([[9.0, -999_999.0, 3.0]])}, "column 'age' holds 1e+06"),
        ({"batch": batch_of([[np.inf, 2.0, 1.0]])}, "column 'price' holds inf"),
        ({"by_fp8": 2.01, "by_bf16": 1.0}, "FP8 is the likely cause"),
        ({"by_fp8": NAN}, "FP8 is the likely cause"),
        ({"by_fp8": 2.0, "by_bf16": 1.0}, "learning rate is the likely cause"),
        ({"by_fp8": INF, "by_bf16": INF}, "learning rate is the likely cause"),
    ],
)
def test_the_likely_cause_is_named(options, text):
    assert text in cause(**options)


FINE, DOUBTFUL = CappedNe(0.8, 1.0, 99), CappedNe(2.0, 1.0, 99)  # bad once warm


PARTS = ("params", "opt_state", "table", "row_state")


def state_of(window=FINE, skipped_in_a_row=0, **parts):
    """Returns a state with a window of training examples, else finite."""
    ones = {"w": np.ones((3, 2), np.float32), "n": np.int32(3)}
    how = dict(metrics=window, skipped_in_a_row=skipped_in_a_row)
    return SimpleNamespace(**dict.fromkeys(PARTS, ones) | parts | how)


WARMUP, LOG_EVERY = 5, 3
LOOP = SimpleNamespace(log_every=LOG_EVERY)
OPTIM = SimpleNamespace(warmup_steps=WARMUP, loss=None)
RUN = SimpleNamespace(config=SimpleNamespace(optim=OPTIM, loop=LOOP))


@pytest.fixture
def windows(monkeypatch):
    """Takes the metrics of a state for its window."""
    monkeypatch.setattr(metrics, "capped_ne", lambda window: window)


def guard_of(bad_windows=0):
    return Guard(lowest=0.8, bad_windows=bad_windows)


@pytest.mark.usefixtures("windows")
def test_a_window_is_judged_once_the_warm_up_is_over():
    state = state_of(DOUBTFUL)
    assert guard.judged(guard_of(1), RUN, state, WARMUP) == guard_of(0)
    first = guard.judged(guard_of(), RUN, state, WARMUP + 1)
    optim = SimpleNamespace(warmup_steps=WARMUP, loss="mine:loss")
    own = SimpleNamespace(config=SimpleNamespace(optim=optim, loop=LOOP))
    assert guard.judged(guard_of(), own, state, WARMUP + 1) == guard_of()
    assert first.bad_windows == 1
    with pytest.raises(Diverged, match="the NE of the training examples is 2, and"):
        guard.judged(first, RUN, state, WARMUP + 1)


@pytest.mark.usefixtures("windows")
def test_a_bad_window_or_a_poisoned_state_becomes_no_checkpoint():
    def is_healthy(state, step=WARMUP + 1):
        return guard.is_healthy(guard_of(), RUN, state, step)

    assert is_healthy(state_of())
    assert not is_healthy(state_of(DOUBTFUL))
    assert is_healthy(state_of(DOUBTFUL), WARMUP)
    for name, value in zip(PARTS, (NAN, -INF, -INF, NAN), strict=True):
        poison = {name: {"w": np.float32([[1, 1], [1, value]]), "n": np.int32(3)}}
        assert not is_healthy(state_of(**poison))


@pytest.mark.usefixtures("windows")
def test_a_finished_run_is_refused_if_its_end_is_no_good():
    def refuse(state, step=20):
        guard.refuse_ruin(guard_of(), RUN, state, step)

    refuse(state_of(), 0)  # there was nothing to do
    refuse(state_of(skipped_in_a_row=2))
    for skipped, step in ((LOG_EVERY, 20), (2, 2)):
        with pytest.raises(TrainingFailed, match=f"the last {skipped} steps"):
            refuse(state_of(skipped_in_a_row=skipped), step)
    with pytest.raises(Diverged, match="the last steps is no good"):
        refuse(state_of(DOUBTFUL))
