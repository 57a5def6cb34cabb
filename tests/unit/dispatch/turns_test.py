"""Turns: together or alone, and who wants to be alone goes first."""

import contextlib
import threading
import time

import pytest

from loka_jax.dispatch.turns import Turns

_SOON_S = 0.1  # in which a thread that need not wait would have its turn
_LIMIT_S = 300  # for a turn that comes at once where the machine is not busy


class _Thread:
    """Takes a turn in a thread of its own, until it is told to end it."""

    def __init__(self, turn):
        self._turn = turn
        self._has = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        with self._turn:
            self._has.set()
            self._ends.wait()

    def waits(self):
        return not self._has.wait(_SOON_S)

    def has(self):
        return self._has.wait(_LIMIT_S)

    def has_now(self):
        return self._has.is_set()

    def end(self):
        self._ends.set()
        self._thread.join()


def test_some_work_together():
    turns = Turns()
    threads = [_Thread(turns.together()) for _ in range(3)]
    assert all(one.has() for one in threads)
    for one in threads:
        one.end()


def test_one_is_alone():
    turns = Turns()
    first = _Thread(turns.alone())
    assert first.has()
    others = _Thread(turns.alone()), _Thread(turns.together())
    assert all(one.waits() for one in others)
    first.end()
    for one in others:
        assert one.has()
        one.end()


def test_alone_waits_for_all_who_are_together():
    turns = Turns()
    together = [_Thread(turns.together()) for _ in range(2)]
    assert all(one.has() for one in together)
    alone = _Thread(turns.alone())
    for one in together:
        assert alone.waits()
        one.end()
    assert alone.has()
    alone.end()


def test_nobody_begins_together_before_all_were_alone():
    turns = Turns()
    compiles = _Thread(turns.together())
    assert compiles.has()
    ready = [_Thread(turns.alone()) for _ in range(3)]
    assert all(one.waits() for one in ready)
    more = [_Thread(turns.together()) for _ in range(2)]
    compiles.end()
    for _ in range(3):
        until = time.monotonic() + _LIMIT_S
        while not any(one.has_now() for one in ready):
            assert time.monotonic() < until
            time.sleep(0.001)
        assert all(one.waits() for one in more)
        (one,) = (one for one in ready if one.has_now())
        ready.remove(one)
        one.end()
    for one in more:
        assert one.has()
        one.end()


@pytest.mark.parametrize("kind", ["alone", "together"])
def test_an_exception_ends_a_turn(kind):
    turns = Turns()
    with pytest.raises(KeyError), getattr(turns, kind)():
        raise KeyError
    for other in (turns.together, turns.alone):
        thread = _Thread(other())
        assert thread.has()
        thread.end()


def test_who_is_interrupted_waits_no_more(monkeypatch):
    turns = Turns()
    compiles = _Thread(turns.together())
    assert compiles.has()

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(turns._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), turns.alone():
            pass
    other = _Thread(turns.together())
    assert other.has()
    other.end()
    compiles.end()


def test_many_change_their_turns_all_the_time():
    turns, together, alone = Turns(), [], []

    def work():
        for _ in range(50):
            with turns.together(), _noted(together):
                assert not alone
            with turns.alone(), _noted(alone):
                assert not together and len(alone) == 1

    errors = []

    def run():
        try:
            work()
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(_LIMIT_S)
    assert not errors and not any(one.is_alive() for one in threads)


@contextlib.contextmanager
def _noted(names):
    names.append(None)
    time.sleep(0)
    yield
    names.pop()
