"""What is made of the events of a profile."""

import jax.numpy as jnp

from loka_jax.measure.timing import (
    Case,
    Event,
    kernel_time,
    split_at_gaps,
    time_chains,
    time_kernels,
)


def test_events_are_cut_where_the_device_idled():
    starts = ((0.0, 5.0), (7.0, 1.0), (100.0, 2.0), (103.0, 4.0))
    events = [Event(*pair) for pair in starts]
    parts = split_at_gaps(events[::-1], least_gap_ns=50.0)
    assert parts == [events[:2], events[2:]]


def test_kernels_are_added_up_by_call():
    events = [Event(float(i), 1e3 * us) for i, us in enumerate((1, 2, 3, 4, 5, 6))]
    found = kernel_time(events, calls=3)
    assert found == (7.0, 3.0, 11.0, 2.0)
    # Where calls differ in their kernels only the mean is known.
    assert kernel_time(events, calls=4) == (5.25, 5.25, 5.25, 1.5)


def test_every_case_and_chain_is_timed_anywhere():
    cases = {name: Case(jnp.sin, [(jnp.ones(4),), (jnp.ones(4),)]) for name in "ab"}
    times = time_kernels(cases)
    assert set(times) == {"a", "b"}
    assert all(0 < t.min_us <= t.median_us <= t.max_us for t in times.values())
    called = []
    chains = {"chain": lambda count: called.append(count)}
    assert time_chains(chains, calls=5, rounds=2)["chain"].median_us > 0
    assert called == [5, 5, 5]
