"""The step that Probe observes first is compiled while others run."""

import dataclasses
import threading
from unittest import mock

import chex
import jax
import pytest

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


def test_it_is_compiled_once_in_a_thread_and_changes_no_bit(compiled):
    run = build_lib.build(config(), None, lambda line: None)
    batch, probe = run.read(run.splits.train, 0), PROBE.config_at(4)
    plain = run.train_step()(run.init(), batch)
    again = run.train_step()(run.init(), batch)
    expected = run.train_step(probe=probe)(plain, batch)
    run.programs.clear()
    step = run.train_step(probe=probe)
    compiled.clear()
    step.compile_ahead(again, batch)
    after = step(again, batch)
    (thread,) = compiled
    assert thread is not threading.current_thread()
    chex.assert_trees_all_equal(vars(after), vars(expected))


@pytest.mark.parametrize("fails", [False, True])
def test_the_loop_begins_it_once_and_an_error_there_is_harmless(
    monkeypatch, tmp_path, fails
):
    support.share_data(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    error = RuntimeError("no compiler") if fails else None
    lower = mock.create_autospec(TrainStep.lower, side_effect=error)
    monkeypatch.setattr(TrainStep, "lower", lower)
    assert session.train(config(workdir=tmp_path, max_steps=6), []).exit_code == 0
    lower.assert_called_once()
