"""Trials whose processes end in every way; small scripts stand in for training."""

import contextlib
import sys

import jax
import pytest

from loka_jax.fitting import changed
from loka_jax.search import trial
from loka_jax.train.folder.config_file import from_json
from tests.support.configs import tiny

SCRIPT = """
import json, os, signal, sys, time
for file in sys.argv[2:]:
    size = json.load(open(file))["loop"]["batch_size"]
    if size == 2: time.sleep(60)
    if size == 3: os.kill(os.getpid(), signal.SIGKILL)
    if size == 4: sys.exit("a bad kernel")
    status = "memory" if size == 5 else "ok"
    out = {"status": status, "rates": [float(size), os.getpid()], "why": None}
    print(json.dumps(out | {"seconds": 0.0}), flush=True)
    if size == 5: break
"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(trial, "PROGRAM", (sys.executable, "-c", SCRIPT))


def outcomes(*sizes, together=1, seconds=20.0):
    base = tiny("fp8_dlrm").identity()
    configs = [
        from_json(base | {"loop": base["loop"] | {"batch_size": size}}, "test")
        for size in sizes
    ]
    return list(trial.measured(configs, seconds, together))


def test_a_process_takes_several_trials_and_another_goes_on_after_a_failure():
    ended = outcomes(11, 4, 12, 13, 5, 14, together=3)
    assert [x.status for x in ended] == ["ok", "crash", "ok", "ok", "memory", "ok"]
    assert [x.rates[0] for x in ended if x.status == "ok"] == [11, 12, 13, 14]
    assert ended[1].why == "it ended with code 1: a bad kernel"
    first, second, third, _, last = (x.rates[1] for x in ended if x.rates)
    assert second == third and len({first, second, last}) == 3  # processes


def test_a_kill_and_a_hang_end_a_trial_alone():
    ended = outcomes(3, 11)
    assert [x.status for x in ended] == ["killed", "ok"]
    (hung,) = outcomes(2, seconds=0.5)
    assert (hung.status, hung.why) == ("hang", "no result within 0.5 seconds")
    assert 0.5 <= hung.seconds < 10


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB"), "memory"),
        (MemoryError("9 GB"), "memory"),
        (ValueError("a bad option"), "crash"),
    ],
)
def test_what_a_trial_raises_is_told_apart(monkeypatch, error, status):
    def fail(*_):
        raise error

    monkeypatch.setattr(trial, "rates_of", fail)
    outcome = trial.outcome_of(tiny("fp8_dlrm"))
    assert outcome.status == status and str(error) in outcome.why


def test_lines_suffice_by_number_and_time():
    begun = []
    lines = trial._Lines(lambda: begun.append(len(lines.rates)))
    lines.log({"examples_per_second": None, "seconds": 1.0})  # compiled meanwhile
    assert not begun
    with pytest.raises(trial._Enough):
        for i in range(100):
            lines.log({"examples_per_second": 10.0 + i, "seconds": i / 4})
    assert begun == [1]
    assert len(lines.rates) == 1 + 6  # at least five, for a second
    with pytest.raises(trial._Enough):  # at the end of the data
        trial._Lines(lambda: None).log({"kind": "eval", "seconds": 1.0})


def test_slow_steps_have_short_lines():
    config = changed(tiny("fp8_dlrm"), {"loop.log-every": 64})
    every = [trial.paced(config, us).loop.log_every for us in (900, 9e3, 30e3, 900e3)]
    assert every == [64, 16, 8, 8]
    calls = changed(config, {"loop.steps-per-call": 16})
    assert trial.paced(calls, 900e3).loop.log_every == 16
    users = changed(config, {"loop.log-every": 4})
    assert trial.paced(users, 900e3) == users


def test_a_trial_does_nothing_but_train():
    config = trial.as_trial(tiny("fp8_dlrm"))
    steps = config.loop.max_steps
    assert steps > 1e5 and config.loop.eval_every > steps
    assert config.loop.save_every > steps
    assert config.probe.look_every == config.probe.observe_every == 0


@pytest.mark.parametrize(("plan", "first"), [("off", "together"), ("auto", "alone")])
def test_kernels_of_a_plan_are_timed_while_no_other_process_computes(
    monkeypatch, plan, first
):
    events = []

    @contextlib.contextmanager
    def turn(folder, kind):
        events.append(f"{kind} in {folder}")
        yield
        events.append("ends")

    def train(run, begin):
        begin()
        return [run]

    monkeypatch.setattr(trial, "gpu_turn", turn)
    monkeypatch.setattr(trial, "build", lambda *_: events.append("builds") or 7.0)
    monkeypatch.setattr(trial, "_rates", train)
    config = changed(tiny("fp8_dlrm"), {"plan": plan})
    assert trial.rates_of(config, "here") == [7.0]
    turns = [f"{first} in here", "builds", "ends", "together in here", "ends"]
    assert events == [*turns, "alone in here", "ends"]
    events.clear()
    assert trial.rates_of(config) == [7.0] and events == ["builds"]
