"""The closed loop of the load test, and what it takes for a right answer."""

import asyncio
import pathlib
import time

import numpy as np
import pytest

pytest.importorskip("aiohttp")
from experiments.bench import load


@pytest.fixture
def session():
    session = load._Session.__new__(load._Session)
    session._arguments = load.Arguments(model=pathlib.Path(), connections=3)
    return session


def test_each_client_asks_again_once_it_is_answered(session):
    now, most = 0, 0

    async def ask(_, start, due_s):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return load.Seen(due_s, 0.01, 200, False, True)

    session._ask = ask
    seen = asyncio.run(session._closed_loop(None, time.perf_counter(), 0.1, 0))
    assert most == 3 and len(seen) >= 6
    assert all(0 <= x.due_s < 0.1 for x in seen)


def test_with_scores_of_a_file_an_answer_has_the_same_bits(session):
    session._expected, session._tolerance = np.float32([[0.1, 0.7, 0.3]]), 0.0
    exact = np.float32([0.3, 0.1]).tolist()
    assert session._agrees(exact, np.array([2, 0]))
    assert not session._agrees([exact[0], np.nextafter(exact[1], 1)], np.array([2, 0]))
    assert not session._agrees(exact, np.array([0, 2]))
