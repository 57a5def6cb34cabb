"""Batches made and moved to the device ahead of the step that needs them.

One background thread makes the batches in order, so what comes out does not depend on
timing: it is what a plain loop over positions would give.
"""

import itertools
import queue
import threading
from types import TracebackType

import jax

from loka_jax.data.batch import Batch, Dataset, Position, next_position


class Prefetcher:
    """Iterates over (position, batch) pairs, a few batches ahead.

    Use it as a context manager, or call `close`: either ends the thread. An exception
    while making a batch is raised by the `next` that would have returned it.
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
    ):
        """Starts the thread.

        Args:
            dataset: where batches come from.
            start: the first batch; epochs follow each other from there.
            batch_size: rows of a batch.
            shuffle: as `Dataset.batch` has it.
            num_batches: how many; endless if None.
            depth: batches that wait on the device at most.
            sharding: where to put them; JAX's default device if None.
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
                    batch = dataset.batch(position, batch_size, shuffle=shuffle)
                    if not self._put((position, jax.device_put(batch, sharding))):
                        return
                    position = next_position(position, per_epoch)
                self._put(StopIteration())
            except BaseException as error:  # handed to the consumer, whatever it is
                self._put(error)

        self._thread = threading.Thread(target=produce, name="prefetch", daemon=True)
        self._thread.start()

    def _put(self, item) -> bool:
        """Waits for room; returns False if the consumer has gone meanwhile."""
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
        """Ends the thread and forgets the batches that wait; may be called twice."""
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
        """Closes."""
        self.close()
