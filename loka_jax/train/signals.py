"""Ctrl-C and SIGTERM: between two steps while training, at once at other times."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Whether the run was asked to stop, and the exit code that says by what.

    A first signal raises `SystemExit`, which cleans up on its way out; inside
    `deferred` it is only remembered, so that the step can end and be saved. A second
    one ends the process at once.
    """

    def __init__(self):
        """Nothing was asked yet."""
        self._signal: int | None = None
        self._is_deferred = False

    @property
    def is_set(self) -> bool:
        """True once a signal came."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, 0 if nothing came."""
        return 0 if self._signal is None else 128 + self._signal

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the block a first signal only sets `is_set`, which must be polled."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def __call__(self, number: int, _frame):
        """Handles a signal."""
        if self.is_set:
            os._exit(128 + number)
        self._signal = number
        if not self._is_deferred:
            raise SystemExit(self.exit_code)


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
