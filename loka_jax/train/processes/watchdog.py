"""Ends a process whose run makes no progress, as when another one hangs.

A collective waits for ever for a process that is stuck, and nothing else notices.
"""

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from loka_jax.terminal import printable

_TICKS = 20  # in the time without progress
_watching: "list[Watchdog]" = []


def alive() -> None:
    """Notes progress of this process, if it is watched."""
    for watchdog in _watching:
        watchdog.ticks_left = _TICKS


@contextmanager
def resting(rests: bool = True) -> Iterator[None]:
    """Leaves out the time within the block, such as that of a compilation."""
    for watchdog in _watching:
        watchdog.is_resting = rests
    try:
        yield
    finally:
        alive()
        for watchdog in _watching:
            watchdog.is_resting = False


class Watchdog:
    """Ends the process when `alive` was not called for some time in a `with` block."""

    def __init__(self, seconds: float, *, end: Callable[[int], None] = os._exit):
        """Takes the time without progress after which the process ends."""
        self._seconds, self._end = seconds, end
        self._watched = threading.get_ident()
        self.ticks_left, self.is_resting = _TICKS, False
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        _watching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        # Ticks rather than a clock: a process that was stopped as a whole, or slept
        # with its machine, has a chance to go on.
        while not self._closed.wait(self._seconds / _TICKS):
            self.ticks_left -= not self.is_resting
            if self.ticks_left < 0:
                self._give_up()
                return

    def _give_up(self) -> None:
        faulthandler.dump_traceback(all_threads=True)
        where = _place(self._watched)
        sentence = (
            f"error: no step within {self._seconds:g} s (--watchdog): this process "
            f"waits at {where}, likely for another one that is stuck."
        )
        print(printable(sentence), file=sys.stderr, flush=True)
        self._end(1)


def _place(thread: int) -> str:
    """Returns where in this package a thread is, as "step.py:12 in train_step"."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end"
    stack = traceback.extract_stack(frame)
    own = [part for part in stack if "/loka_jax/" in part.filename] or stack
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno} in {own[-1].name}"
