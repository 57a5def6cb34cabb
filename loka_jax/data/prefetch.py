"""Makes batches and moves them to the device ahead of the step that needs them.

One background thread makes the batches in order, so the result does not depend on
timing: it equals that of a plain loop over positions.
"""

import collections
import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Sharding

from loka_jax.data.batch import WHOLE, Batch, Dataset, Part, Position, next_position


class Prefetcher:
    """Iterates over (position, batch) pairs, a few batches ahead.

    Use it as a context manager or call `close`: both end the thread. An exception
    while making a batch is raised by the `next` that would have returned the batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        start: Position,
        batch_size: int,
        *,
        shuffle: bool,
        num_batches: int | None = None,
        depth: int = 4,
        sharding: Sharding | None = None,
        part: Part = WHOLE,
    ):
        """Starts the thread.

        Args:
            dataset: the source of the batches.
            start: the position of the first batch; epochs follow one another.
            batch_size: rows of a batch.
            shuffle: as in `Dataset.batch`.
            num_batches: the number of batches; endless if None.
            depth: the largest number of batches that wait on the device.
            sharding: the batches' placement; JAX's default device if None.
            part: the slice that this process reads; the batches are whole ones over
                the devices of all processes.
        """
        if not depth >= 1:
            raise ValueError(f"{depth=} must be at least 1.")

        def make(position: Position) -> tuple[Position, Batch]:
            batch = dataset.batch(position, batch_size, shuffle=shuffle, part=part)
            return position, placed(batch, sharding, part)

        per_epoch = dataset.num_batches(batch_size)
        self._positions = itertools.islice(_positions(start, per_epoch), num_batches)
        self._thread, self._make = ThreadPoolExecutor(1, "prefetch"), make
        self._ahead: collections.deque[Future] = collections.deque()
        self._start(depth + 1)  # one of them is in the thread's hands

    def _start(self, count: int) -> None:
        for position in itertools.islice(self._positions, count):
            self._ahead.append(self._thread.submit(self._make, position))

    def __iter__(self) -> "Prefetcher":
        """Returns itself."""
        return self

    def __next__(self) -> tuple[Position, Batch]:
        """Returns the next position and its batch, on the device."""
        if not self._ahead:
            raise StopIteration
        try:
            item = self._ahead.popleft().result()
        except BaseException:
            self.close()
            raise
        self._start(1)
        return item

    def close(self) -> None:
        """Ends the thread and drops the waiting batches; may be called twice."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> "Prefetcher":
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the prefetcher."""
        self.close()


def _positions(position: Position, per_epoch: int) -> Iterator[Position]:
    while True:
        yield position
        position = next_position(position, per_epoch)


def placed(batch: Batch, sharding: Sharding | None, part: Part) -> Batch:
    """Returns a batch on devices; of a process's part of one, the whole batch.

    Args:
        batch: the part that this process has read or made.
        sharding: of the whole batch; None for JAX's default device. Where there are
            several processes, it splits the rows in the order of the processes.
        part: which part it is.
    """
    if sharding is None or part.count == 1:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda rows: _spread(rows, sharding, part), batch)


def _spread(rows: Any, sharding: Sharding, part: Part) -> jax.Array:
    """Returns the array over several processes of which this one has some rows.

    Rows that lie on their device already, as generated ones do, stay there. Asking JAX
    to put them there costs the host much: 1,199 us a step of a small model on four
    GPUs in place of 1,027 (input_threads_4xh100.json).
    """
    first = part.index * len(rows)
    shape = (part.count * len(rows), *rows.shape[1:])
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        start, stop, _ = index[0].indices(shape[0])
        assert first <= start <= stop <= first + len(rows)
        own = rows if stop - start == len(rows) else rows[start - first : stop - first]
        shards.append(own if _is_on(own, device) else jax.device_put(own, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _is_on(rows: Any, device: Any) -> bool:
    return isinstance(rows, jax.Array) and rows.devices() == {device}
