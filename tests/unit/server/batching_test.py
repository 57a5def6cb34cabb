"""Requests are collected up to a size or a wait, and answered in their order."""

import asyncio
import contextlib
import threading

import pytest

pytest.importorskip("aiohttp")

from loka_jax.server.app import Batcher, Busy, Limits

LONG = 3600.0  # more than a test may take


def run(values, *, function=None, max_rows=4, wait_s=0.05, **limits):
    """Returns the results of requests that come at once, and the batches."""
    batches = []

    def seen(batch):
        batches.append(list(batch))
        return [10 * x for x in batch] if function is None else function(batch)

    async def main():
        how = dict(max_rows=max_rows, wait_s=wait_s, **limits)
        async with working(seen, **how) as batcher:
            asked = [batcher.result(value, rows) for value, rows in values]
            return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(main()), batches


@contextlib.asynccontextmanager
async def working(function, *, max_rows, wait_s=LONG, max_waiting=100):
    """Yields a batcher that works."""
    how = dict(max_rows=max_rows, wait_ms=1e3 * wait_s, max_waiting=max_waiting)
    batcher = Batcher(function, Limits(**how))
    work = asyncio.create_task(batcher.work())
    yield batcher
    work.cancel()


def test_a_batch_holds_as_many_rows_as_fit_and_waits_no_longer():
    results, batches = run([(1, 2), (2, 2), (3, 2), (4, 1), (5, 9), (6, 1)])
    assert results == [10, 20, 30, 40, 50, 60]
    assert batches == [[1, 2], [3, 4], [5], [6]]
    # A batch that is full does not wait, nor does one that the next does not fit.
    results, batches = run([(1, 3), (2, 4), (3, 4)], wait_s=LONG)
    assert (results, batches) == ([10, 20, 30], [[1], [2], [3]])


def test_a_request_waits_for_others_and_no_longer_than_it_is_to(monkeypatch):
    async def main():
        async with working(list, max_rows=2) as batcher:
            first = asyncio.create_task(batcher.result("a", 1))
            await asyncio.sleep(0.05)
            assert not first.done()
            return await batcher.result("b", 1), await first

    assert asyncio.run(main()) == ("b", "a")
    timeout, waits = asyncio.timeout, []
    monkeypatch.setattr(asyncio, "timeout", lambda s: waits.append(s) or timeout(0.02))
    assert run([("a", 1)], max_rows=100, wait_s=0.5, function=list)[0] == ["a"]
    assert waits[0] == 0.5


def test_more_rows_than_may_wait_are_refused_until_others_are_answered():
    results, _ = run([(1, 3), (2, 2), (3, 1)], max_waiting=4)
    assert results[0] == 10 and results[2] == 30  # exactly as many as may wait
    assert isinstance(results[1], Busy)

    async def main():
        async with working(list, max_rows=3, max_waiting=3) as batcher:
            return [await batcher.result(x, 3) for x in "abc"]

    assert asyncio.run(main()) == ["a", "b", "c"]


def test_an_error_is_that_of_its_batch_alone():
    def fails(batch):
        if 2 in batch:
            raise ZeroDivisionError
        return batch

    results, _ = run([(1, 1), (2, 1), (3, 1)], max_rows=1, function=fails)
    assert results[0] == 1 and results[2] == 3
    assert isinstance(results[1], ZeroDivisionError)


def test_who_is_gone_does_not_stop_the_others():
    release = threading.Event()

    async def main():
        run = lambda batch: batch if release.wait(60) else None  # noqa: E731
        async with working(run, max_rows=2, wait_s=0.02) as batcher:
            gone, stays = (asyncio.create_task(batcher.result(x, 1)) for x in "ab")
            await asyncio.sleep(0.001)
            gone.cancel()
            release.set()
            result = await asyncio.wait_for(stays, 60)
        with pytest.raises(asyncio.CancelledError):
            await gone
        return result

    assert asyncio.run(main()) == "b"
