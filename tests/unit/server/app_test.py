"""What a worker answers, without sockets; how often its socket is handed on."""

import asyncio
import json
import math
import os
import signal
import socket
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from loka_jax.server import app, restarts, supervise

FORM = "the body must be JSON of the form"


@pytest.mark.parametrize(
    "body, said",
    [
        *[(x, FORM) for x in (b"", b"\xff", b"[" * 100_000, b"[1]", b'{"rows": [3]}')],
        (b'{"rows": [{"x": 1' + b"0" * 5000 + b"}]}", FORM),
        (b'{"rows": [{}, {}, {}, {}, {}]}', "there are 5 rows: send 1 to 4"),
        (b'{"rows": [{"x": 1}, {"y": 1}]}', "row 2 has no 'x': add it, or null"),
    ],
    ids=str,
)
def test_a_malformed_body_is_one_sentence(body, said):
    with pytest.raises(ValueError, match=said) as error:
        app.columns_of(body, ("x",), 4)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_rows_become_columns():
    body = b'{"rows": [{"x": 1, "y": "a", "z": 0}, {"x": null, "y": "b"}]}'
    assert app.columns_of(body, ("y", "x"), 2) == {"y": ["a", "b"], "x": [1, None]}


class Doubler:
    """Doubles numbers; a number below 0 has no score, and 99 ends in an error."""

    columns = ("x",)
    health = {"model": "doubler"}

    def encode(self, columns):
        if not all(isinstance(x, int) for x in columns["x"]):
            raise ValueError("row 1 column 'x' is no integer: correct it.")
        return columns["x"]

    def run(self, batch):
        assert 99 not in batch[0]
        return [[math.nan if x < 0 else 2 * x for x in values] for values in batch]


def answers(*requests, **limits):
    """Returns status, answer and header "Connection" of requests that come at once.

    A request is a list of numbers, or an error that reading its body raises.
    """

    def request(given):
        if not isinstance(given, Exception):
            given = json.dumps({"rows": [{"x": x} for x in given]}).encode()
        return SimpleNamespace(read=mock.AsyncMock(side_effect=[given]))

    async def main():
        worker = app.Worker(Doubler(), app.Limits(**limits))
        work = asyncio.create_task(worker._batcher.work())
        asked = [worker._score(request(given)) for given in requests]
        found = await asyncio.gather(*asked, return_exceptions=True)
        work.cancel()
        return [one if isinstance(one, Exception) else _said(one) for one in found]

    return asyncio.run(main())


def _said(answer):
    return answer.status, json.loads(answer.text), answer.headers.get("Connection")


def test_what_is_wrong_has_a_status_and_a_sentence():
    too_large = web.HTTPRequestEntityTooLarge(1, 2)
    requests = ["a"], [1, 2, 3], [1, -1], web.RequestPayloadError(), too_large
    bad, many, lost, unread, long = answers(*requests, max_rows=2)
    assert bad[:2] == (400, {"error": "row 1 column 'x' is no integer: correct it."})
    assert many[:2] == (400, {"error": "there are 3 rows: send 1 to 2."})
    said = "the model gives row 2 a score that is no number."
    assert lost == (500, {"error": said}, None)
    assert (unread[0], unread[2]) == (400, "close")
    assert "is not encoded as Content-Encoding says" in unread[1]["error"]
    assert (long[0], long[2]) == (413, "close")
    assert "longer than 16,777,216 bytes" in long[1]["error"]
    (bug,) = answers([99])
    assert isinstance(bug, AssertionError)


def test_rows_are_counted_against_those_that_may_wait():
    first, second, third = answers([1, 2], [3, 4], [5], max_rows=8, max_waiting=3)
    assert first == (200, {"scores": [2, 4]}, None)
    assert third == (200, {"scores": [10]}, None)
    assert second[:2] == (503, {"error": "too many rows wait: send them later."})


def test_a_worker_says_who_it_is_and_when_it_ends():
    worker = app.Worker(Doubler(), app.Limits())
    said = asyncio.run(worker._health(SimpleNamespace()))
    own = {"columns": ["x"], "worker": os.getpid()}
    assert json.loads(said.text) == {"model": "doubler"} | own
    worker._ending.set()
    asyncio.run(worker._close_at_end(SimpleNamespace(), response := web.Response()))
    assert response.headers.get("Connection") == "close"  # and come back
    for limit in ({"max_rows": 0}, {"wait_ms": float("nan")}, {"wait_ms": -1.0}):
        with pytest.raises(ValueError, match=r"--(max-r|wait-)\S+ \S+ must be at lea"):
            app.Limits(**limit)


def test_requests_and_batches_are_counted_for_prometheus():
    async def main():
        worker = app.Worker(Doubler(), app.Limits(max_rows=8))
        work = asyncio.create_task(worker._batcher.work())

        def request(body):
            read = mock.AsyncMock(return_value=body)
            return SimpleNamespace(path="/score", read=read)

        for body in (b'{"rows": [{"x": 1}, {"x": 2}]}', b"[]", b'{"rows": [{"x": 5}]}'):
            await worker._metrics.counted(request(body), worker._score)
        work.cancel()
        return (await worker._measures(SimpleNamespace())).text

    lines = dict(line.rsplit(" ", 1) for line in asyncio.run(main()).splitlines())
    assert lines['loka_requests_total{status="200"}'] == "2.0"
    assert lines['loka_requests_total{status="400"}'] == "1.0"
    assert lines["loka_request_seconds_count"] == "3.0"
    assert lines["loka_batch_rows_sum"] == "3.0"
    assert lines['loka_batch_rows_bucket{le="1.0"}'] == "1.0"
    assert lines["loka_waiting_rows"] == "0.0"


def test_a_port_that_cannot_be_had_is_one_sentence():
    with pytest.raises(ValueError, match="--port 65536 is none: ports are 0 to 65535"):
        supervise(["true"], "127.0.0.1", 65536)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .* choose another --host"):
            supervise(["true"], "127.0.0.1", port)


ENDED = mock.call.terminate(), mock.call.wait()


def process(pid, code=None):
    """Returns a worker that is ready at once, or ends before that with a code."""
    made = mock.Mock(pid=pid, returncode=code)
    made.poll = lambda: code
    return made


@pytest.fixture
def supervised(monkeypatch):
    """Returns a function from workers and signals to the code and what was said."""

    def run(workers, *signals, pending=()):
        lines, started, heard = [], iter(workers), iter(signals)
        monkeypatch.setattr(restarts, "_start_worker", lambda *_: next(started))
        monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
        monkeypatch.setattr(signal, "sigpending", lambda: {*pending})
        monkeypatch.setattr(signal, "sigwait", lambda _: next(heard))
        return supervise(["x"], "127.0.0.1", 0, say=lines.append), lines

    return run


def test_a_restart_ends_the_old_worker_once_the_new_one_is_ready(supervised):
    old, new, signals = process(1), process(2), (signal.SIGHUP, signal.SIGTERM)
    code, (first, second, *_) = supervised([old, new], *signals)
    assert (code, second) == (0, "worker 2 is ready") and first.endswith(", worker 1")
    assert old.mock_calls == new.mock_calls == [*ENDED]
    old, new = process(1), process(2, code=3)
    code, lines = supervised([old, new], *signals)
    assert code == 0 and lines[1] == "the new worker ended before it was ready"
    assert old.mock_calls == [*ENDED] and not new.mock_calls


def test_a_worker_that_ends_by_itself_is_replaced_or_ends_the_server(supervised):
    def run(*signals, **new):
        """Of a worker that runs until it is first looked at."""
        (old := process(1)).poll = lambda: 9
        return supervised([old, process(2, **new)], signal.SIGCHLD, *signals)

    code, lines = run(signal.SIGINT)
    assert code == 0 and lines[1] == "worker 2 is ready"
    assert run(code=4)[0] == 4
    # Another process of it ended.
    assert supervised([process(1)], signal.SIGCHLD, signal.SIGTERM)[0] == 0


def test_a_worker_that_is_never_ready_gives_its_code(supervised):
    assert supervised([process(1, code=5)]) == (5, [])
    assert supervised([process(1, code=0)]) == (1, [])
    killed = supervised([process(1, code=-9)], pending=[signal.SIGTERM])
    assert killed == (0, [])
