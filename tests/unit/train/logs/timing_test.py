import dataclasses
import time

import jax
import jax.numpy as jnp
import pytest

from loka_jax.data import Position
from loka_jax.train.logs.timing import Clock, Profiler
from loka_jax.train.watch.host_state import Progress

START = Progress(position=Position(0, 0, 0))


def after(examples, seconds):
    return dataclasses.replace(START, examples=examples, seconds=seconds)


def test_what_was_left_out_is_in_no_rate():
    clock = Clock(START)
    assert clock.session_rate(START) is None
    clock.rewind(after(100, 50.0))  # 100 examples while something was compiled
    assert clock.rate(after(100, 50.0)) is None
    assert clock.rate(after(500, 52.0)) == 200
    clock.mark(after(500, 52.0))
    assert clock.rate(after(500, 52.0)) is None
    clock.rewind(after(600, 99.0))
    assert clock.session_rate(after(1400, 101.0)) == 300  # 1200 in 4 s


def test_only_what_compiles_is_noticed_and_once():
    double, begun = jax.jit(lambda x: x * 2), time.perf_counter()
    clock = Clock(START)
    assert clock.compile_seconds() == 0
    double(1.0)
    found = clock.compile_seconds()
    assert 0 < found < time.perf_counter() - begun
    assert clock.has_compiled() and not clock.has_compiled()
    double(3.0)
    assert not clock.has_compiled() and clock.compile_seconds() == found
    double(1)  # another dtype
    clock.restart()
    assert not clock.has_compiled()


BEGIN, END = "start_trace", "stop_trace"


@pytest.mark.parametrize(
    "traced, taken, expected",
    [
        (range(2, 4), range(6), [0, 1, BEGIN, 2, 3, END, 4, 5]),
        (range(2, 5), range(4, 6), [BEGIN, 4, END, 5]),  # a resumed run
        (range(0, 9), range(2), [BEGIN, 0, 1, END]),  # a run that ends before it
    ],
)
def test_a_trace_holds_the_steps_of_its_range(
    monkeypatch, tmp_path, traced, taken, expected
):
    events = []
    for name in (BEGIN, END):
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
    assert all(e[1:] == ((str(tmp_path),) if e[0] == BEGIN else ()) for e in events)
