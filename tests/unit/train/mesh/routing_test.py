"""How long lists of ids are, which batches are routed when, and when rows are averaged.

Programs are replaced: what a batch needs is the largest of its ids.
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from loka_jax.data import Batch, Events
from loka_jax.ops.exchange import Routed
from loka_jax.ops.row_average import Remembered
from loka_jax.ops.tables import TableSpec
from loka_jax.train.mesh.devices import AXES, MeshConfig
from loka_jax.train.mesh.routing import (
    Counts,
    RoutedBatch,
    Router,
    capacity_for,
    with_needs,
)
from loka_jax.train.mesh.row_sync import RowSync
from tests.support.loop import start_state

TABLES = TableSpec(rows=(40_000, 50), dim=4)
ONE = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)


def test_capacities_leave_room_and_come_from_a_ladder():
    for need in (0, 1, 15, 100, 20_000, 10**6):
        capacity = capacity_for(float(need), 2**31)
        assert need + 4 * np.sqrt(need) <= capacity <= 1.06 * need + 5 * need**0.5 + 32
    assert len({capacity_for(float(n), 2**31) for n in range(20_000, 21_000)}) <= 3
    assert capacity_for(1000.0, 900) == 900


def batch_of(need):
    ones = np.ones(2, np.float32)
    return Batch(ones[:, None], np.full((2, 2), need, np.int32), ones, ones)


def routed_of(capacity, batch):
    """Returns what routing a batch gives, with lists of that capacity."""
    lists = Routed(np.zeros((1, capacity)), None, None, None, None)
    return RoutedBatch(lists, Counts(np.max(batch.ids), 0, 2.0))


def run_alone(capacity, batch):
    return with_needs([routed_of(capacity, batch)])


def needs_routed(router, batches):
    """Returns what the batches need that a program of steps on others routes."""
    found = []

    def program(state, placed, routed, coming, spent):
        found.extend(np.max(batch.ids) for batch in coming)
        made = [routed_of(router.capacity, batch) for batch in coming]
        return state, None, with_needs(made)

    router.run(program, {}, batches)
    return found


def router_of(steps_per_call=1):
    """Returns a router, and the capacity of each batch that it has routed alone."""
    router, alone = Router(ONE, TABLES, steps_per_call=steps_per_call), []

    def run(capacity, batch):
        alone.append(capacity)
        return run_alone(capacity, batch)

    router._run = run
    return router, alone


def test_lists_that_do_not_fit_are_routed_again():
    router, alone = router_of()
    for need in (4, 16):  # they may be full
        router(batch_of(need))
        assert (router.capacity, router.climbs, alone[0]) == (16, 0, 16)
    _, many = router(batch_of(17))
    # A climb is by half at least.
    assert router.climbs == 1 and router.capacity == capacity_for(24.0, 2**31)
    assert many.capacity == router.capacity and many.missing[0] <= 0
    # The first batch climbs by its need alone, and is no climb.
    router, _ = router_of()
    router(batch_of(17))
    assert (router.capacity, router.climbs) == (capacity_for(17.0, 2**31), 0)


@pytest.mark.parametrize("per_call, ahead", [(1, 3), (2, 4)])
def test_a_step_routes_the_batch_of_three_steps_or_two_calls_later(per_call, ahead):
    router, alone = router_of(per_call)
    batches, made = [batch_of(4 + i) for i in range(10)], []
    steps = router.look_ahead(
        made.append(i) or (i, batch) for i, batch in enumerate(batches)
    )
    for first in range(0, 10, per_call):
        taken = [batch for _, batch in itertools.islice(steps, per_call)]
        assert all(a is b for a, b in zip(taken, batches[first:], strict=False))
        assert made[-1] == min(first + per_call - 1 + ahead, 9)
        alone.clear()
        _, routed = router.together(taken)
        assert bool(alone) == (first < ahead)  # later ones were routed by a step
        assert [one.counts.need for one in routed] == [np.max(x.ids) for x in taken]
        later = batches[first + ahead : first + ahead + per_call] or taken
        assert needs_routed(router, taken) == [np.max(x.ids) for x in later]


def test_batches_of_other_rows_are_routed_alone_and_written_over_by_their_like():
    router, alone = router_of()
    rows = [128, 128, 128, 256, 128, 128, 128, 128]
    batches = [
        batch_of(i)._replace(events=Events(*[np.zeros((count, 1))] * 6, None, None))
        for i, count in enumerate(rows)
    ]
    over, routed = [], {}

    def program(state, placed, given, coming, spent):
        (one,), (old,) = placed, spent
        over.append((len(one.events.ids), routed.get(id(old))))
        routed[id(given[0])] = len(one.events.ids)
        kept.append(given)
        return state, None, with_needs([routed_of(router.capacity, coming[0])])

    kept = []  # so that no number is given twice
    for _, batch in router.look_ahead(enumerate(batches)):
        alone.clear()
        router.run(program, {}, [batch])
        number = int(np.max(batch.ids))
        # The first three, that of other rows, and the one that it would have routed.
        assert bool(alone) == (number in (0, 1, 2, 3, 6))
    assert [old for count, old in over if old is not None] == [128] * 6
    assert all(old in (None, count) for count, old in over)


def test_what_was_routed_before_lists_grew_is_routed_again():
    router, _ = router_of(2)
    steps = router.look_ahead(enumerate(map(batch_of, (4, 5, 6, 256, 7, 8))))
    _, batch = next(steps)
    assert needs_routed(router, [batch]) == [7]
    taken = [batch for _, batch in itertools.islice(steps, 2)]
    _, routed = router.together(taken)
    assert [one.capacity for one in routed] == [16, 16]
    taken = [batch for _, batch in itertools.islice(steps, 2)]
    _, routed = router.together(taken)
    # The first did not fit, and both have lists of the same length.
    assert [one.capacity for one in routed] == [router.capacity] * 2
    assert router.climbs == 1 and router.capacity > 256


def state_of(name):
    """Returns a state that may be told apart, whose table may be referred to weakly."""
    return dataclasses.replace(start_state(), table=np.zeros(1), row_state=name)


@pytest.fixture
def averages():
    """What is averaged: groups that do so every three steps, and their averages."""
    wire = MeshConfig(sync="weights", sync_every=3)
    sync, made = RowSync(ONE, wire, TABLES, None), []

    def distinct(log):
        return Remembered(np.zeros(64), None, None), np.int32(sum(log))

    def average(capacity, table, row_state, before, step):
        made.append(capacity)
        return np.zeros(1), "averaged"

    sync._distinct, sync._average = distinct, average
    return sync, made


def test_groups_average_every_three_steps_and_when_they_are_asked(averages):
    sync, made = averages
    state = state_of("start")
    for number in range(1, 4):
        state = sync.after(state, state_of(number), number)
        assert state.row_state == (number if number < 3 else "averaged")
    assert made == [capacity_for(6.0, 64)]
    assert sync(state) is state  # nothing was touched since
    asked = sync.after(state, state_of("new"), 40)
    early = sync(asked)
    assert early is not asked and made[1:] == [capacity_for(40.0, 64)] == [64]
    # Lists never become shorter.
    sync(sync.after(early, state_of("new"), 1))
    assert made[2:] == [64]


def test_what_was_touched_in_another_state_is_forgotten(averages):
    sync, made = averages
    sync.after(state_of("one"), state_of("two"), 30)
    other, state = state_of("other"), state_of("state")
    assert sync(other) is other and not made
    sync(sync.after(state, state_of("new"), 5))  # of a state of its own
    assert made == [capacity_for(5.0, 64)]
