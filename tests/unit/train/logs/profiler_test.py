"""A trace of some steps: when it starts and ends."""

import jax
import jax.numpy as jnp
import pytest

from loka_jax.train.logs.profiler import Profiler


@pytest.fixture
def events(monkeypatch):
    found = []
    for name in ("start_trace", "stop_trace"):
        note = lambda *args, name=name: found.append((name, *args))  # noqa: E731
        monkeypatch.setattr(jax.profiler, name, note)
    return found


def take(profiler, steps, events):
    for step in steps:
        profiler.before(step)
        events.append(step)
        profiler.after(step, jnp.zeros(()))


def test_the_trace_holds_the_steps_of_the_range(events, tmp_path):
    take(Profiler(range(2, 4), tmp_path), range(6), events)
    start = ("start_trace", str(tmp_path))
    assert events == [0, 1, start, 2, 3, ("stop_trace",), 4, 5]


def test_a_resumed_run_traces_what_is_left_of_the_range(events, tmp_path):
    take(Profiler(range(2, 5), tmp_path), range(4, 6), events)
    assert events == [("start_trace", str(tmp_path)), 4, ("stop_trace",), 5]


def test_close_ends_a_trace_that_the_run_did_not_reach_the_end_of(events, tmp_path):
    profiler = Profiler(range(0, 9), tmp_path)
    take(profiler, range(2), events)
    profiler.close()
    profiler.close()
    assert events.count(("stop_trace",)) == 1


def test_no_range_traces_nothing(events, tmp_path):
    profiler = Profiler(range(0), tmp_path)
    take(profiler, range(3), events)
    profiler.close()
    assert events == [0, 1, 2]
