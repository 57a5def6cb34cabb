"""A model behind HTTP: requests are checked, collected into batches, and answered.

    POST /score    {"rows": [{"price": 1.5, "user": "u1"}, ...]}
                   200 {"scores": [0.2, ...]}, or {"error": "a sentence"} with
                   400 if the request is malformed, 413 if it is too long,
                   500 if a score is no number, 503 if too many rows wait
    GET /health    200 {"name": ..., "step": ..., "columns": [...], "worker": its pid}
    GET /metrics   requests by status, their seconds, rows of batches, and rows that
                   wait, of this worker, for Prometheus

On SIGTERM the worker stops accepting, answers all that it has accepted, asks
clients to close their connections, and ends.
"""

import asyncio
import dataclasses
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

try:
    import prometheus_client as prometheus
    from aiohttp import web
except ImportError as error:
    message = f"{error.name} is not installed: pip install 'loka-jax[serve]'."
    raise ImportError(message) from None

from loka_jax.options import require
from loka_jax.server.restarts import listen_to_parent

_FORM = 'the body must be JSON of the form {"rows": [{"COLUMN": value, ...}, ...]}'
_MAX_BYTES = 1 << 24  # of a body


@runtime_checkable
class Scorer(Protocol):
    """The model that is served."""

    columns: Sequence[str]  # that a row must have
    health: Mapping[str, Any]  # the answer of /health

    def encode(self, columns: Mapping[str, list[Any]]) -> Any:
        """Returns the inputs of rows; raises a ValueError that says what is wrong."""
        ...

    def run(self, batch: Sequence[Any]) -> Sequence[list[Any]]:
        """Returns the scores of each request of a batch."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a worker.

    Attributes:
        max_rows: rows of a batch, and of a request.
        wait_ms: how long the first request of a batch waits for others.
        max_waiting: rows that may wait; further ones are refused.
        grace_s: how long connections are kept after SIGTERM for their next request,
            whose answer closes them.
    """

    max_rows: int = 1024
    wait_ms: float = 1.0
    max_waiting: int = 65536
    grace_s: float = 3.0

    def __post_init__(self):
        require(self.max_rows >= 1, "--max-rows", self.max_rows, "at least 1")
        is_wait = 0 <= self.wait_ms < math.inf
        require(is_wait, "--wait-ms", self.wait_ms, "at least 0")


def columns_of(
    body: bytes, names: Sequence[str], max_rows: int
) -> dict[str, list[Any]]:
    """Returns the columns of a request's rows; a ValueError says what is malformed."""
    try:
        rows = json.loads(body)["rows"]
        if not isinstance(rows, list) or not all(isinstance(x, dict) for x in rows):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{_FORM}.") from None
    if not 1 <= len(rows) <= max_rows:
        raise ValueError(f"there are {len(rows):,} rows: send 1 to {max_rows:,}.")
    for number, row in enumerate(rows, 1):
        for name in names:
            if name not in row:
                raise ValueError(f"row {number} has no {name!r}: add it, or null.")
    return {name: [row[name] for row in rows] for name in names}


class Busy(Exception):
    """More requests wait than the server has been told to hold."""


class Metrics:
    """What a worker counts, for Prometheus."""

    def __init__(self):
        """Starts at zero."""
        self.registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter(
            "loka_requests", "Requests by status.", ["status"], registry=self.registry
        )
        self.seconds = prometheus.Histogram(
            "loka_request_seconds", "Seconds of a request.", registry=self.registry
        )
        self.rows = prometheus.Histogram(
            "loka_batch_rows",
            "Rows of a batch.",
            buckets=[4**i for i in range(9)],
            registry=self.registry,
        )
        self.waiting = prometheus.Gauge(
            "loka_waiting_rows", "Rows that wait for scores.", registry=self.registry
        )

    @web.middleware
    async def counted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answers a request, and counts it."""
        start = time.monotonic()
        try:
            response = await handler(request)
        except web.HTTPException as error:
            self.requests.labels(str(error.status)).inc()
            raise
        except Exception:  # is counted, and goes on to the server
            self.requests.labels("500").inc()
            raise
        if request.path == "/score":
            self.seconds.observe(time.monotonic() - start)
        self.requests.labels(str(response.status)).inc()
        return response


class _Request(NamedTuple):
    """A request that waits."""

    value: Any
    rows: int
    answer: asyncio.Future  # of its result


class Batcher:
    """Runs requests in batches, in the order in which they came.

    A batch has a size, and its first request waits no longer than it is to. While it
    runs in a thread, the next one fills.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        limits: Limits,
        seen: Callable[[int], Any] = lambda rows: None,
    ):
        """Takes the function from the values of a batch to their results.

        `seen` is called with the rows of each batch. A request of more rows than a
        batch may have is a batch of its own.
        """
        self._run, self._limits, self._waiting = run, limits, 0
        self._seen = seen
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._held: _Request | None = None

    @property
    def waiting(self) -> int:
        """The number of rows that wait, or are scored."""
        return self._waiting

    async def result(self, value: Any, rows: int) -> Any:
        """Returns the result of a value, or raises Busy if too many rows wait."""
        if self._waiting + rows > self._limits.max_waiting:
            raise Busy
        self._waiting += rows
        answer = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Request(value, rows, answer))
        return await answer

    async def work(self) -> None:
        """Runs batches until it is cancelled."""
        while True:
            batch = await self._batch()
            self._seen(sum(request.rows for request in batch))
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
            async with asyncio.timeout(self._limits.wait_ms / 1e3):
                while rows < self._limits.max_rows:
                    request = await self._queue.get()
                    rows += request.rows
                    if rows > self._limits.max_rows:
                        self._held = request
                        break
                    batch.append(request)
        except TimeoutError:
            pass
        return batch


class Worker:
    """Answers requests until it is told to end."""

    def __init__(self, scorer: Scorer, limits: Limits):
        self._scorer, self._limits = scorer, limits
        self._metrics = Metrics()
        self._batcher = Batcher(scorer.run, limits, self._metrics.rows.observe)
        self._metrics.waiting.set_function(lambda: self._batcher.waiting)
        self._ending = asyncio.Event()

    async def serve(self, listening: socket.socket, ready: int) -> None:
        """Answers requests until SIGTERM; once it does, it writes a byte to `ready`."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._ending.set)
        listen_to_parent()
        app = web.Application(
            client_max_size=_MAX_BYTES, middlewares=[self._metrics.counted]
        )
        app.on_response_prepare.append(self._close_at_end)
        app.router.add_post("/score", self._score)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._measures)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=60)
        await runner.setup()
        site = web.SockSite(runner, listening)
        await site.start()
        work = asyncio.create_task(self._batcher.work())
        os.write(ready, b"1")
        os.close(ready)
        await self._ending.wait()
        await site.stop()
        await asyncio.sleep(self._limits.grace_s)
        await runner.cleanup()  # after the last answer
        work.cancel()

    async def _score(self, request: web.Request) -> web.Response:
        limit = self._limits.max_rows
        try:
            body = await request.read()
        except web.RequestPayloadError:
            sentence = "the body is not encoded as Content-Encoding says."
            return _close_after(_error(sentence, 400))
        except web.HTTPRequestEntityTooLarge:
            sentence = f"the body is longer than {_MAX_BYTES:,} bytes."
            return _close_after(_error(sentence, 413))
        try:
            columns = columns_of(body, self._scorer.columns, limit)
            inputs = self._scorer.encode(columns)
        except ValueError as error:
            return _error(str(error), 400)
        count = len(columns[self._scorer.columns[0]])
        try:
            scores = await self._batcher.result(inputs, count)
        except Busy:
            return _error("too many rows wait: send them later.", 503)
        if (row := _first_bad_row(scores)) is not None:
            return _error(f"the model gives row {row} a score that is no number.", 500)
        return web.json_response({"scores": scores})

    async def _health(self, request: web.Request) -> web.Response:
        del request
        own = {"columns": list(self._scorer.columns), "worker": os.getpid()}
        return web.json_response({**self._scorer.health, **own})

    async def _measures(self, request: web.Request) -> web.Response:
        del request
        text = prometheus.generate_latest(self._metrics.registry)
        return web.Response(
            body=text, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST}
        )

    async def _close_at_end(self, request: web.Request, response: web.StreamResponse):
        """Asks a client to connect again, if this worker ends."""
        del request
        if self._ending.is_set():
            _close_after(response)


def _close_after[R: web.StreamResponse](response: R) -> R:
    """Returns an answer after which the connection ends, as its header says.

    aiohttp ends it by itself where it could not read a body, without that header.
    """
    response.force_close()
    response.headers["Connection"] = "close"
    return response


def _first_bad_row(scores: list[Any]) -> int | None:
    """Returns the number of the first row with a score that is no number."""
    is_bad = ~np.isfinite(np.reshape(scores, (len(scores), -1))).all(axis=1)
    return int(np.argmax(is_bad)) + 1 if is_bad.any() else None


def _error(sentence: str, status: int) -> web.Response:
    return web.json_response({"error": sentence}, status=status)
