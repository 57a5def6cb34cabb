"""Intervals, compiled programs, and times."""

import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.measure import timing
from loka_jax.measure.compiling import abstract, compile_lowered, leaves, lower
from loka_jax.measure.intervals import Interval, interval, next_value
from loka_jax.measure.timing import Case, Event


def test_edges_of_intervals():
    found = interval(np.array([1.0, 2.0, 6.0]))
    half = 4.302653 * math.sqrt(7.0 / 3)  # Student's, of two degrees of freedom
    np.testing.assert_allclose(found, (3.0, 3.0 - half, 3.0 + half), rtol=1e-6)
    assert found.half == pytest.approx(half)
    found = next_value(3.0, math.sqrt(7.0), 3)
    np.testing.assert_allclose(found.half, 4.302653 * math.sqrt(7 * 4 / 3), rtol=1e-6)
    assert interval(np.array([2.0])) == Interval(2.0, 2.0, 2.0)
    assert math.isnan(interval(np.array([2.0, np.nan])).high)
    assert next_value(2.0, 0.0, 1) == Interval(2.0, -math.inf, math.inf)
    assert next_value(2.0, 0.0, 5) == Interval(2.0, 2.0, 2.0)


def test_a_compiled_program_takes_the_leaves_of_its_arguments():
    x = np.ones(3, np.float32)

    def run(pair, by_name):
        return pair[0] + 2 * pair[1] - by_name["b"]

    arguments = abstract(((x, x), {"b": x}))
    failing = lower(lambda *args: args[0].nothing, arguments, {})
    compiled = compile_lowered({"run": lower(run, arguments, {}), "failing": failing})
    found = compiled["run"](*leaves(((x, 3 * x), {"b": x})))
    np.testing.assert_array_equal(found, 6 * x)
    assert isinstance(compiled["failing"], AttributeError)


def test_events_are_cut_where_the_device_idled_and_added_up_by_call():
    starts = ((0.0, 5.0), (7.0, 1.0), (100.0, 2.0), (103.0, 4.0))
    events = [Event(*pair) for pair in starts]
    parts = timing.split_at_gaps(events[::-1], least_gap_ns=50.0)
    assert parts == [events[:2], events[2:]]
    # It is not idle while a kernel runs beside others.
    beside = [Event(0.0, 60.0), Event(5.0, 1.0), Event(100.0, 2.0)]
    assert timing.split_at_gaps(beside, least_gap_ns=50.0) == [beside]
    events = [Event(float(i), 1e3 * (i + 1)) for i in range(6)]
    assert timing.kernel_time(events, calls=3) == (7.0, 3.0, 11.0, 2.0)
    # Where calls differ in their kernels only the mean is known.
    assert timing.kernel_time(events, calls=4) == (5.25, 5.25, 5.25, 1.5)


def test_every_case_and_chain_is_timed_anywhere():
    cases = {name: Case(jnp.sin, [(jnp.ones(4),)] * 2) for name in "ab"}
    times = timing.time_kernels(cases)
    assert times.keys() == cases.keys()
    assert all(0 < t.min_us <= t.median_us <= t.max_us for t in times.values())
    called = []
    chains = timing.time_chains({"chain": called.append}, calls=5, rounds=2)
    assert chains["chain"].median_us > 0 and called == [5, 5, 5]


def test_the_first_round_of_a_chain_warms_up(monkeypatch):
    # Of two chains the beginnings of the first round, of which no end is asked for, and
    # beginnings and ends of two more.
    clock = iter([0.0, 0.0, *(0.0, 40.0), *(0.0, 10.0), *(0.0, 20.0), *(0.0, 30.0)])
    stand_in = types.SimpleNamespace(perf_counter=clock.__next__)
    monkeypatch.setattr(timing, "time", stand_in)
    times = timing.time_chains(
        dict.fromkeys("ab", lambda count: None), calls=10, rounds=2
    )
    assert times == {"a": (3e6, 2e6, 4e6, None), "b": (2e6, 1e6, 3e6, None)}
