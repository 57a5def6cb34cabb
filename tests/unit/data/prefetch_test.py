"""Prefetching changes when batches are made, and nothing else."""

import itertools
import threading
import time

import chex
import jax
import numpy as np
import pytest

from loka_jax.data import WHOLE, Batch, Part, Position, Schema
from loka_jax.data import prefetch as prefetch_lib
from loka_jax.data.prefetch import placed


class Numbered:
    """Batches that hold their own position; `fail_at` is a step that breaks."""

    schema = Schema(label="y", dense=("x",), categorical=(), vocab_sizes=())

    def __init__(self, steps=4, fail_at=None):
        self.steps, self.fail_at, self.asked = steps, fail_at, []

    def num_batches(self, batch_size):
        return self.steps

    def batch(self, position, batch_size, *, shuffle, part=WHOLE):
        if position.step == self.fail_at:
            raise ValueError("row 7 is bad")
        self.asked.append((batch_size, shuffle, part))
        value = 100 * position.epoch + position.step
        column = np.full(batch_size, value, np.float32)
        return Batch(column[:, None], np.int32(column[:, None]), column, column)


START = Position(0, 0, 5)


def prefetch(data, start=START, *, shuffle=True, **options):
    return prefetch_lib.prefetch(data, start, 10, shuffle=shuffle, **options)


def test_batches_come_in_order_across_epochs_as_in_a_plain_loop():
    data = Numbered()
    with prefetch(data, Position(0, 2, 5)) as batches:
        got = list(itertools.islice(batches, 5))
    want = [(0, 2, 5), (0, 3, 5), (1, 0, 5), (1, 1, 5), (1, 2, 5)]
    assert [position for position, _ in got] == [Position(*place) for place in want]
    for position, batch in got:
        assert isinstance(batch.dense, jax.Array)
        plain = data.batch(position, 10, shuffle=True)
        chex.assert_trees_all_equal(jax.device_get(batch), plain)


def test_what_is_asked_for_reaches_the_data():
    data, part = Numbered(), Part(1, 2)
    with prefetch(data, num_batches=3, shuffle=False, part=part) as batches:
        assert len(list(batches)) == 3
    assert data.asked == [(10, False, part)] * 3


def test_an_exception_surfaces_after_the_batches_before_it():
    with prefetch(Numbered(fail_at=2)) as batches:
        assert len([next(batches), next(batches)]) == 2
        with pytest.raises(ValueError, match="row 7 is bad"):
            next(batches)
        assert list(batches) == []  # and not again, and no hang


def test_no_more_than_depth_batches_wait_and_leaving_ends_the_thread():
    data = Numbered(steps=1000)
    with pytest.raises(KeyboardInterrupt), prefetch(data, depth=2) as batches:
        next(batches)
        while len(data.asked) < 4:  # one taken, two waiting, one in the thread's hands
            time.sleep(0.001)
        time.sleep(0.2)
        assert len(data.asked) == 4
        raise KeyboardInterrupt
    assert not any("prefetch" in thread.name for thread in threading.enumerate())
    assert list(batches) == []


class SecondHalf(jax.sharding.Sharding):
    """The rows 8 to 16 of 16 on two devices of a process, the last ones first."""

    def addressable_devices_indices_map(self, global_shape):
        assert global_shape[0] == 16
        first, second = jax.devices()[:2]
        return {first: (slice(12, 16),), second: (slice(8, 12),)}


def test_a_process_puts_its_rows_where_the_whole_batch_has_them(monkeypatch):
    made = {}

    def record(shape, sharding, shards):
        made[shape] = shards

    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", record)
    rows = np.arange(16, dtype=np.float32)
    ids = np.arange(32, dtype=np.int32).reshape(16, 2)
    batch = Batch(rows[8:, None], ids[8:], rows[8:], rows[8:])
    placed(batch, SecondHalf(), Part(1, 2))
    for shape, whole in (((16,), rows), ((16, 2), ids)):
        last, first = made[shape]
        assert [next(iter(x.devices())) for x in (last, first)] == jax.devices()[:2]
        np.testing.assert_array_equal(last, whole[12:])
        np.testing.assert_array_equal(first, whole[8:12])
