"""Prefetching changes when batches are made, and nothing else."""

import itertools
import threading
import time

import chex
import jax
import numpy as np
import pytest

from loka_jax.data import WHOLE, Batch, Part, Position, Schema
from loka_jax.data.prefetch import Prefetcher


class Numbered:
    """Batches that hold their own position; `fail_at` is a step that breaks."""

    def __init__(self, num_examples=40, fail_at=None):
        self.schema = Schema(label="y", dense=("x",), categorical=(), vocab_sizes=())
        self.num_examples = num_examples
        self.fail_at = fail_at
        self.made = 0

    def num_batches(self, batch_size: int) -> int:
        return self.num_examples // batch_size

    def batch(
        self, position: Position, batch_size: int, *, shuffle: bool, part: Part = WHOLE
    ) -> Batch:
        if position.step == self.fail_at:
            raise ValueError("row 7 is bad")
        self.made += 1
        value = np.float32(100 * position.epoch + position.step)
        column = np.full(batch_size, value, np.float32)
        ids = np.zeros((batch_size, 0), np.int32)
        return Batch(column[:, None], ids, column * 0, column * 0 + 1)


START = Position(0, 0, 5)


def prefetch(data, start=START, **options):
    return Prefetcher(data, start, 10, shuffle=True, **options)


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


def test_batches_come_in_order_across_epochs():
    with prefetch(Numbered(), Position(0, 2, 5)) as batches:
        got = list(itertools.islice(batches, 5))
    want = [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    assert [(p.epoch, p.step) for p, _ in got] == want
    assert [float(b.dense[0, 0]) for _, b in got] == [2.0, 3.0, 100.0, 101.0, 102.0]


def test_it_gives_what_a_plain_loop_gives():
    data = Numbered()
    with prefetch(data, num_batches=4) as batches:
        for position, batch in batches:
            want = data.batch(position, 10, shuffle=True)
            chex.assert_trees_all_equal(jax.device_get(batch), want)


def test_batches_are_on_the_device():
    with prefetch(Numbered(), num_batches=1) as batches:
        _, batch = next(batches)
    assert isinstance(batch.dense, jax.Array)


def test_batches_follow_a_sharding():
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    data = Numbered(num_examples=64)
    with Prefetcher(
        data, Position(0, 0, 0), 16, shuffle=False, sharding=sharding
    ) as batches:
        _, batch = next(batches)
    assert len(batch.labels.sharding.device_set) == 8


def test_the_number_of_batches_is_kept():
    with prefetch(Numbered(), num_batches=3) as batches:
        assert len(list(batches)) == 3


def test_an_exception_surfaces_after_the_batches_before_it():
    with prefetch(Numbered(fail_at=2)) as batches:
        next(batches)
        next(batches)
        with pytest.raises(ValueError, match="row 7 is bad"):
            next(batches)
        assert list(batches) == []  # and not again, and no hang


def test_no_more_than_depth_batches_wait():
    data = Numbered(num_examples=10_000)
    with prefetch(data, depth=2) as batches:
        next(batches)
        while data.made < 4:  # one taken, two waiting, one in the thread's hands
            time.sleep(0.001)
        time.sleep(0.2)
        assert data.made == 4


def test_closing_early_ends_the_thread():
    batches = prefetch(Numbered())
    next(batches)
    batches.close()
    batches.close()
    assert not prefetch_threads()
    assert list(batches) == []


def test_an_exception_in_the_consumer_ends_the_thread():
    with pytest.raises(KeyboardInterrupt), prefetch(Numbered()) as batches:
        next(batches)
        raise KeyboardInterrupt
    assert not prefetch_threads()


def test_depth_below_one_is_refused():
    with pytest.raises(ValueError, match="depth=0"):
        prefetch(Numbered(), depth=0)
