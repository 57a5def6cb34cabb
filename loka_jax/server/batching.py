"""Collects requests into batches, up to a size or a wait after the first.

While a batch runs in a thread, the next one fills.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Busy(Exception):
    """More requests wait than the server has been told to hold."""


class _Request(NamedTuple):
    """A request that waits."""

    value: Any
    rows: int
    answer: asyncio.Future  # of its result


class Batcher:
    """Runs requests in batches, in the order in which they came."""

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        *,
        max_rows: int,
        wait_s: float,
        max_waiting: int,
    ):
        """Takes the function and the limits.

        Args:
            run: from the values of a batch to their results; runs in a thread.
            max_rows: of a batch; one larger request is a batch of its own.
        """
        self._run, self._max_rows, self._wait_s = run, max_rows, wait_s
        self._max_waiting, self._waiting = max_waiting, 0
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._held: _Request | None = None

    async def result(self, value: Any, rows: int) -> Any:
        """Returns the result of a value, or raises Busy if too many rows wait."""
        if self._waiting + rows > self._max_waiting:
            raise Busy
        self._waiting += rows
        answer = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Request(value, rows, answer))
        return await answer

    async def work(self) -> None:
        """Runs batches until it is cancelled."""
        while True:
            batch = await self._batch()
            try:
                results = await asyncio.to_thread(self._run, [x.value for x in batch])
            except Exception as error:  # each request says so; the next batch runs
                results = [error] * len(batch)
            self._waiting -= sum(request.rows for request in batch)
            for (*_, answer), result in zip(batch, results, strict=True):
                if answer.done():  # whoever asked is gone
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

    async def _batch(self) -> list[_Request]:
        """Returns the next batch, once it is full or its first request has waited."""
        first, self._held = self._held or await self._queue.get(), None
        batch, rows = [first], first.rows
        try:
            async with asyncio.timeout(self._wait_s):
                while rows < self._max_rows:
                    request = await self._queue.get()
                    rows += request.rows
                    if rows > self._max_rows:
                        self._held = request
                        break
                    batch.append(request)
        except TimeoutError:
            pass
        return batch
