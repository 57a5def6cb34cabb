"""Malformed requests are told so; restarts and the end lose none of the others."""

import asyncio
import contextlib
import gzip
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

aiohttp = pytest.importorskip("aiohttp")

from loka_jax.server import app, supervise  # noqa: E402
from tests.whole.server.worker import HELD, LOST  # noqa: E402

HERE = pathlib.Path(__file__).parent
PATHS = filter(None, [str(HERE.parents[2]), *sys.path])
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}
START = """
import sys
from loka_jax.server import supervise
sys.exit(supervise([sys.executable, *sys.argv[1:]], "127.0.0.1", 0,
                   say=lambda line: print(line, flush=True)))
"""
LIMIT_SECONDS = 300  # for what takes seconds where the machine is not busy


@contextlib.contextmanager
def server(gate):
    """Yields the process of a server, and its address."""
    command = [sys.executable, "-c", START, str(HERE / "worker.py"), str(gate)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        assert process.stdout is not None
        found = re.fullmatch(r"listening at (\d+), .*\n", process.stdout.readline())
        assert found is not None
        yield process, f"http://127.0.0.1:{found[1]}"
    finally:
        (gate / "open").touch()
        process.terminate()
        process.wait(LIMIT_SECONDS)
        process.stdout.close()


async def until(is_true):
    async with asyncio.timeout(LIMIT_SECONDS):
        while not is_true():
            await asyncio.sleep(0.01)


async def ask(session, address, x):
    """Returns the status and the answer."""
    body = {"rows": [{"x": value} for value in x]}
    async with session.post(f"{address}/score", json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize(
    "body, said",
    [
        (b"", "the body must be JSON of the form"),
        (b"[" * 100_000, "the body must be JSON"),
        (b'{"rows": 3}', "the body must be JSON"),
        (b'{"rows": [3]}', "the body must be JSON"),
        (b"[1]", "the body must be JSON"),
        (b'{"rows": []}', "there are 0 rows: send 1 to 4"),
        (b'{"rows": [{}, {}, {}, {}, {}]}', "there are 5 rows: send 1 to 4"),
        (b'{"rows": [{"x": 1}, {"y": 1}]}', "row 2 has no 'x': add it, or null"),
        (b'{"rows": [{"x": 1' + b"0" * 5000 + b"}]}", "the body must be JSON"),
        (b"\xff\xfe", "the body must be JSON"),
    ],
)
def test_a_malformed_body_is_one_sentence(body, said):
    with pytest.raises(ValueError, match=said) as error:
        app.columns_of(body, ("x",), 4)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


@pytest.mark.parametrize("limit", [{"max_rows": 0}, {"wait_ms": float("nan")}])
def test_limits_that_serve_nothing_are_refused(limit):
    with pytest.raises(ValueError, match=r"--(max-rows|wait-ms) \S+ must be at least"):
        app.Limits(**limit)


def test_a_port_that_does_not_exist_is_one_sentence():
    with pytest.raises(ValueError, match="--port 99999 is none: ports are 0 to 65535"):
        supervise(["true"], "127.0.0.1", 99999)


def test_a_port_that_is_taken_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} .* choose another --host"):
            supervise(["true"], "127.0.0.1", port)


def test_a_server_that_is_loading_ends_at_once_when_told_to():
    worker = [sys.executable, "-c", "import time; time.sleep(600)"]
    start = (
        f"from loka_jax.server import supervise; supervise({worker}, '127.0.0.1', 0)"
    )
    with subprocess.Popen([sys.executable, "-c", start], env=ENVIRONMENT) as process:
        while not children(process.pid):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def children(pid):
    """Returns the processes that a process has started."""
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_rows_become_columns():
    body = b'{"rows": [{"x": 1, "y": "a", "z": 0}, {"x": null, "y": "b"}]}'
    assert app.columns_of(body, ("y", "x"), 4) == {"y": ["a", "b"], "x": [1, None]}


def test_answers_errors_and_load_that_is_too_much(tmp_path):
    async def main(address):
        async with aiohttp.ClientSession() as session:
            assert await ask(session, address, [1, 2]) == (200, {"scores": [2, 4]})
            status, said = await ask(session, address, ["a"])
            assert (status, said["error"].startswith("row 1 column 'x'")) == (400, True)
            async with session.post(f"{address}/score", data=b"{") as response:
                assert response.status == 400
            assert (await ask(session, address, [3] * 9))[0] == 400
            held = asyncio.create_task(ask(session, address, [HELD]))
            await until((tmp_path / "held").exists)
            # Beside the row that is held, of 16 rows three times 4 may wait.
            many = [
                asyncio.create_task(ask(session, address, [i] * 4)) for i in range(12)
            ]
            await until(lambda: sum(one.done() for one in many) == 9)
            assert {one.result()[0] for one in many if one.done()} == {503}
            (tmp_path / "open").touch()
            answers = [(i, await one) for i, one in enumerate(many)]
            kept = [(i, said) for i, (status, said) in answers if status == 200]
            assert len(kept) == 3
            assert all(said == {"scores": [2 * i] * 4} for i, said in kept)
            assert await held == (200, {"scores": [2 * HELD]})
            async with session.get(f"{address}/health") as response:
                assert (await response.json())["model"] == "doubler"
            async with session.post(
                f"{address}/score", json={"rows": [{"x": -1}]}
            ) as response:
                assert response.status == 500
            status, said = await ask(session, address, [1, LOST])
            assert (status, "row 2" in said["error"]) == (500, True)
            assert (await ask(session, address, [5]))[0] == 200  # it goes on

    with server(tmp_path) as (_, address):
        asyncio.run(main(address))


def test_a_body_that_cannot_be_read_is_one_sentence(tmp_path):
    async def main(address):
        gzipped = {"Content-Encoding": "gzip"}
        long = gzip.compress(b" " * ((1 << 24) + 1))
        async with aiohttp.ClientSession() as session:
            for headers, body, status, said in [
                (gzipped, b"{}", 400, "is not encoded as"),
                (gzipped, long, 413, "longer than 16,777,216 bytes"),
            ]:
                async with session.post(
                    f"{address}/score", data=body, headers=headers
                ) as response:
                    answer = await response.json()
                assert response.status == status and said in answer["error"]
            assert (await ask(session, address, [5]))[0] == 200  # it goes on

    with server(tmp_path) as (_, address):
        asyncio.run(main(address))


def test_restarts_under_load_and_the_end_lose_nothing(tmp_path):
    asked, answers, workers = [], [], set()

    async def client(session, address, number):
        while len(workers) < 3:
            asked.append(x := 100_000 * number + len(asked))
            answers.append((x, await ask(session, address, [x])))
            if x % 10 == 0:
                async with session.get(f"{address}/health") as response:
                    workers.add((await response.json())["worker"])

    async def main(process, address):
        async with aiohttp.ClientSession() as session:
            clients = [client(session, address, number) for number in range(6)]
            running = asyncio.gather(*clients)
            for count in (1, 2):
                while len(workers) < count:
                    await asyncio.sleep(0.01)
                process.send_signal(signal.SIGHUP)
            await running
            last = asyncio.create_task(ask(session, address, [HELD]))
            await until((tmp_path / "held").exists)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)  # the worker may have heard of it by then
            (tmp_path / "open").touch()
            assert await last == (200, {"scores": [2 * HELD]})

    with server(tmp_path) as (process, address):
        asyncio.run(asyncio.wait_for(main(process, address), LIMIT_SECONDS))
        assert process.wait(LIMIT_SECONDS) == 0
    assert len(asked) == len(answers) == len({x for x, _ in answers})
    assert all(answer == (200, {"scores": [2 * x]}) for x, answer in answers)


def test_a_worker_that_never_gets_ready_ends_the_server():
    command = [sys.executable, "-c", START, "/no/worker.py"]
    paths = os.pathsep.join([str(HERE.parents[2]), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": paths}
    ended = subprocess.run(command, env=env, capture_output=True)
    assert (ended.returncode, ended.stdout) == (2, b"")


def test_a_worker_that_dies_is_replaced(tmp_path):
    async def worker(session, address):
        async with session.get(f"{address}/health") as response:
            return (await response.json())["worker"]

    async def main(address):
        async with aiohttp.ClientSession() as session:
            first = await worker(session, address)
        os.kill(first, signal.SIGKILL)
        async with aiohttp.ClientSession() as session:
            assert await worker(session, address) != first
            assert await ask(session, address, [4]) == (200, {"scores": [8]})

    with server(tmp_path) as (_, address):
        asyncio.run(main(address))
