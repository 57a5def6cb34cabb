"""Malformed requests are told so; restarts and the end lose none of the others."""

import asyncio
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

aiohttp = pytest.importorskip("aiohttp")

from tests.whole.server.worker import HELD  # noqa: E402

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
        found = re.fullmatch(r"listening at (\S+), .*\n", process.stdout.readline())
        assert found is not None
        yield process, found[1]
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
