"""Stopping between two steps when asked to: Ctrl-C and SIGTERM."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Whether the run was asked to stop, and the exit code that says by what.

    The first signal is remembered, so that the step can end and be saved; a second one
    ends the process at once.
    """

    def __init__(self):
        """Nothing was asked yet."""
        self._signal: int | None = None

    @property
    def is_set(self) -> bool:
        """True once a signal came."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, 0 if nothing came."""
        return 0 if self._signal is None else 128 + self._signal

    def __call__(self, number: int, _frame):
        """Handles a signal."""
        if self.is_set:
            os._exit(128 + number)
        self._signal = number


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns Ctrl-C and SIGTERM into a `StopRequest` for as long as the block runs."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may handle signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, request) for number in numbers]
    try:
        yield request
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
