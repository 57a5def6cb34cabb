"""Errors of products, the operands that they are measured on, and times."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loka_jax.measure import site_errors, timing
from loka_jax.measure.compiling import abstract, compile_lowered, leaves, lower
from loka_jax.measure.errors import errors
from loka_jax.measure.intervals import Interval, interval, next_value
from loka_jax.measure.timing import Case, Event
from loka_jax.probe.site import ProbeConfig, empty_stats
from loka_jax.recipe import get_recipe
from tests import support

_errors = jax.jit(errors)


def test_errors_are_those_of_the_definitions():
    ref = np.float32([[1.0, 2.0, 8.0], [0.0, 4.0, 1.0], [0.0, 0.0, 0.0]])
    x = np.float32([[1.1, 2.0, 8.0], [0.5, 3.0, 1.0], [0.0, 0.0, 0.0]])
    found = _errors(ref, x)
    np.testing.assert_allclose(found.mere, (0.1 + 0.25) / 5, rtol=1e-5)
    np.testing.assert_allclose(found.relative_l2, (1.26 / 86) ** 0.5, rtol=1e-5)
    np.testing.assert_allclose(found.median, 0.0)
    np.testing.assert_allclose(found.worst_row, (1.25 / 17) ** 0.5, rtol=1e-5)
    exact = _errors(ref, ref)
    assert exact.relative_l2 == exact.worst_row == exact.mere == 0
    off = ref * np.float32([[1.5, 1.5, 1.25]])  # zeros do not count
    np.testing.assert_allclose(_errors(ref, off).median, 0.5)


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


def test_delayed_scales_are_made_from_the_amaxes_of_their_operands():
    arrays = [support.normal(*s, seed=sum(s)) for s in ((6, 4), (4, 3), (6, 3))]
    amaxes = np.array([np.abs(x).max() for x in arrays])
    for role, own in (("fwd", (0, 1)), ("dlhs", (2, 1)), ("drhs", (0, 2))):
        found = site_errors._role_amaxes(role, *(arrays[i] for i in own))
        expected = np.where(np.isin(range(3), own), amaxes, 1)
        np.testing.assert_allclose(found, expected)
    np.testing.assert_allclose(site_errors.operand_amaxes(tuple(arrays)), amaxes)
    assert site_errors.scaling_state(get_recipe("fp8_rowwise"), found) is None


def test_learned_operands_are_drawn_from_the_statistics_of_each(monkeypatch):
    shapes = jax.eval_shape(lambda: empty_stats(4, 3, ProbeConfig()))
    stats = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    for name, value in (("lhs", 1.001), ("g", 2.001)):
        rows = getattr(stats, name)
        rows = jax.tree.map(lambda x, value=value: x + np.float32(value), rows)
        stats = stats._replace(**{name: rows})

    def sample_rows(key, moments, m, norms):
        np.testing.assert_array_equal(norms.counts, moments.mean[0])
        return jnp.tile(moments.mean[None], (m, 1))

    monkeypatch.setattr(site_errors, "sample_rows", sample_rows)
    monkeypatch.setattr(site_errors, "sample_weight", lambda key, x: x.mean)
    with jax.disable_jit():
        drawn = site_errors.draw_learned(jax.random.key(0), stats, 6)
    # Of lhs and g, values that bfloat16 holds.
    assert (drawn.lhs[0, 0], drawn.g[0, 0]) == (1.0, 2.0)
    assert [x.shape for x in drawn] == [(6, 4), (4, 3), (6, 3)]


def test_equal_programs_are_compiled_once_for_the_same_options():
    x = np.ones(3, np.float32)
    arguments = abstract(((x, x), {"b": x}))

    def run(pair, by_name):
        return pair[0] + 2 * pair[1] - by_name["b"]

    one = lower(run, arguments, {})
    same = lower(lambda *args: run(*args), arguments, {})
    other = lower(run, arguments, {"xla_cpu_enable_fast_math": "true"})
    compiled = compile_lowered({"one": one, "same": same, "other": other})
    assert compiled["one"] is compiled["same"] is not compiled["other"]
    found = compiled["one"](*leaves(((x, 3 * x), {"b": x})))
    np.testing.assert_array_equal(found, 6 * x)


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
    assert times == {"a": (3e6, 2e6, 4e6), "b": (2e6, 1e6, 3e6)}
