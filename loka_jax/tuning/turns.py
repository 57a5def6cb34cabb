"""Turns: many compile together, or one has the GPU alone to take times."""

import contextlib
import threading
from collections.abc import Iterator


class Turns:
    """Grants turns to threads, and prefers who wants to be alone.

    Nobody begins a turn together while somebody waits for, or has, one alone. So those
    who compile come to their end, all who are ready take times, one after another, and
    then all go on compiling. If whoever has taken times could compile at once, all the
    others would wait for that.
    """

    def __init__(self):
        """Begins with nobody's turn."""
        self._changed = threading.Condition()
        self._together = 0  # who have their turn
        self._alone = 0  # who wait for theirs, or have it
        self._one = threading.Lock()  # of the latter

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Waits until nobody is, or waits to be, alone; a turn while it is open."""
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
        """Waits until nobody else has a turn; one while it is open.

        Whoever has a turn together must end it first.
        """
        with self._changed:
            self._alone += 1
        try:
            with self._one:
                with self._changed:
                    self._changed.wait_for(lambda: not self._together)
                yield
        finally:
            with self._changed:
                self._alone -= 1
                self._changed.notify_all()
