"""Turns: several workers compile together, or one has the GPU alone to take times."""

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Grants turns to threads; a turn alone takes precedence.

    No shared turn begins while a thread waits for, or has, a turn alone: it would keep
    all that wait to take times waiting for one more compilation.
    """

    def __init__(self):
        """Begins without a turn."""
        self._changed = threading.Condition()
        self._together = 0  # threads with a shared turn
        self._alone = 0  # threads that wait for a turn alone, or have it
        self._exclusive = threading.Lock()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Waits while a thread is, or waits to be, alone; then holds a shared turn."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._together += 1
        try:
            yield
        finally:
            with self._changed:
                self._together -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other thread has a turn; then holds the only one.

        A thread with a shared turn must end it first.
        """
        with self._changed:
            self._alone += 1
        try:
            with self._exclusive:
                with self._changed:
                    self._changed.wait_for(lambda: not self._together)
                yield
        finally:
            with self._changed:
                self._alone -= 1
                self._changed.notify_all()
