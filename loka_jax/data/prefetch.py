"""Makes batches and moves them to the device ahead of the step that needs them.

One background thread makes the batches in order, so the result does not depend on
timing: it equals that of a plain loop over positions.
"""

import itertools
import queue
import threading
from types import TracebackType
from typing import Any

import jax
from jax.sharding import Sharding

from loka_jax.data.batch import (
    WHOLE,
    Batch,
    Dataset,
    Part,
    Position,
    next_position,
)


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
        sharding: jax.sharding.Sharding | None = None,
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
        per_epoch = dataset.num_batches(batch_size)
        counter = itertools.count() if num_batches is None else range(num_batches)
        self._queue: queue.Queue = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._ended = False

        def produce() -> None:
            position = start
            try:
                for _ in counter:
                    batch = dataset.batch(
                        position, batch_size, shuffle=shuffle, part=part
                    )
                    if not self._put((position, placed(batch, sharding, part))):
                        return
                    position = next_position(position, per_epoch)
                self._put(StopIteration())
            except (
                BaseException
            ) as error:  # of any kind: the consumer's thread raises it
                self._put(error)

        self._thread = threading.Thread(target=produce, name="prefetch", daemon=True)
        self._thread.start()

    def _put(self, item) -> bool:
        """Queues an item when there is room; returns False if closed before that."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> "Prefetcher":
        """Returns itself."""
        return self

    def __next__(self) -> tuple[Position, Batch]:
        """Returns the next position and its batch, on the device."""
        if self._ended or self._closed.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._ended = True
            raise item
        return item

    def close(self) -> None:
        """Ends the thread and drops the waiting batches; may be called twice."""
        self._closed.set()
        self._thread.join()
        while not self._queue.empty():
            self._queue.get_nowait()

    def __enter__(self) -> "Prefetcher":
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the prefetcher."""
        self.close()


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
