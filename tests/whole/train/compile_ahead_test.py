"""The step that Probe observes first is compiled while others run."""

import dataclasses
import threading
from unittest import mock

import jax
import pytest

from loka_jax.nn import by_path
from loka_jax.train import build as build_lib
from loka_jax.train import session
from loka_jax.train.config import ProbeOptions
from loka_jax.train.step import TrainStep
from tests.support import train as support

COMPILED = "/jax/core/compile/backend_compile_duration"
PROBE = ProbeOptions(every=4, begin=4, recipes=("fp8_rowwise",))


@pytest.fixture
def compiled():
    """Lists the thread of each compilation."""
    threads = []

    def count(event, duration, **names):
        if event == COMPILED:
            threads.append(threading.current_thread())

    jax.monitoring.register_event_duration_secs_listener(count)
    yield threads
    jax.monitoring.unregister_event_duration_listener(count)


def config(**options):
    made = support.config(**options)
    model = made.model.clone(recipe="bf16")
    return dataclasses.replace(made, model=model, probe=PROBE, plan="off")


def test_it_is_compiled_once_in_a_thread(compiled):
    run = build_lib.build(config(), None, lambda line: None)
    batch = run.read(run.splits.train, 0)
    state = run.train_step()(run.init(), batch)
    step = run.train_step(probe=PROBE.config_at(4))
    compiled.clear()
    step.compile_ahead(state, batch)
    after = step(state, batch)
    (thread,) = compiled
    assert thread is not threading.current_thread() and after.step == 2
    counts = [x.lhs.moments.count for x in by_path(after.probe).values()]
    assert counts and set(map(int, counts)) == {len(batch.ids)}


def test_the_loop_begins_it_once_and_an_error_there_is_harmless(monkeypatch, tmp_path):
    support.share_data(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    error = RuntimeError("no compiler")
    lower = mock.create_autospec(TrainStep.lower, side_effect=error)
    monkeypatch.setattr(TrainStep, "lower", lower)
    assert session.train(config(workdir=tmp_path, max_steps=6), []).exit_code == 0
    lower.assert_called_once()
