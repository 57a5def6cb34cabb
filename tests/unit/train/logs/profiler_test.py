"""A trace of some steps: when it starts and ends."""

import jax
import jax.numpy as jnp
import pytest

from loka_jax.train.logs.profiler import Profiler

START, STOP = "start_trace", "stop_trace"


@pytest.mark.parametrize(
    "traced, taken, expected",
    [
        (range(2, 4), range(6), [0, 1, START, 2, 3, STOP, 4, 5]),
        (range(2, 5), range(4, 6), [START, 4, STOP, 5]),  # a resumed run
        (range(0, 9), range(2), [START, 0, 1, STOP]),  # a run that ends before it
    ],
)
def test_a_trace_holds_the_steps_of_its_range(
    monkeypatch, tmp_path, traced, taken, expected
):
    events = []
    for name in (START, STOP):
        note = lambda *folder, name=name: events.append((name, *folder))  # noqa: E731
        monkeypatch.setattr(jax.profiler, name, note)
    profiler = Profiler(traced, tmp_path)
    for step in taken:
        profiler.before(step)
        events.append((step,))
        profiler.after(step, jnp.zeros(()))
    profiler.close()
    profiler.close()
    assert [event[0] for event in events] == expected
    assert all(e[1:] == ((str(tmp_path),) if e[0] == START else ()) for e in events)
