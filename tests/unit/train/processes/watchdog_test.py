"""The watchdog ends a process that makes no progress, and no other."""

import threading
from types import SimpleNamespace

import pytest

from loka_jax.train.processes import watchdog as watchdog_lib
from loka_jax.train.processes.watchdog import Watchdog, alive, resting

TICKS = watchdog_lib._TICKS


def ended(monkeypatch, ticks, at=None, event=lambda: None):
    """Returns the exit codes after some ticks, of which one comes with an event."""
    codes, waits = [], []
    watchdog = Watchdog(40.0, end=codes.append)

    def wait(seconds):
        if len(waits) == at:
            event()
        waits.append(seconds)
        return len(waits) > ticks

    watchdog._closed = SimpleNamespace(wait=wait)
    monkeypatch.setattr(watchdog_lib, "_watching", [watchdog])
    watchdog._watch()
    assert set(waits) == {40.0 / TICKS}
    return codes


def test_a_process_without_progress_ends_once_with_a_sentence(monkeypatch, capfd):
    assert ended(monkeypatch, TICKS) == []
    assert ended(monkeypatch, 3 * TICKS) == [1]
    *stacks, sentence = capfd.readouterr().err.splitlines()
    assert sentence.startswith("error: no step within 40 s (--watchdog): ")
    assert "this process waits at watchdog.py:" in sentence
    assert any("most recent call first" in line for line in stacks)


def rested():
    with resting():
        pass


@pytest.mark.parametrize("event", [alive, rested])
def test_progress_and_rests_begin_the_time_anew(monkeypatch, event):
    assert ended(monkeypatch, 2 * TICKS, at=TICKS, event=event) == []
    assert ended(monkeypatch, 2 * TICKS + 1, at=TICKS, event=event) == [1]


@pytest.mark.parametrize("rests, codes", [(True, []), (False, [1])])
def test_a_rest_is_left_out(monkeypatch, rests, codes):
    rest = resting(rests)
    assert ended(monkeypatch, 9 * TICKS, at=TICKS, event=rest.__enter__) == codes
    rest.__exit__(None, None, None)
    assert not watchdog_lib._watching[0].is_resting


def test_nothing_is_watched_after_it_was_closed():
    names = lambda: [thread.name for thread in threading.enumerate()]  # noqa: E731
    with Watchdog(3600.0) as watchdog:
        assert watchdog_lib._watching == [watchdog] and "watchdog" in names()
    assert watchdog_lib._watching == [] and "watchdog" not in names()
