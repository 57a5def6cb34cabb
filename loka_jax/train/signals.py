"""Handles Ctrl-C and SIGTERM: between two steps while training, else immediately."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SHOW_CURSOR = b"\x1b[?25h\n"


class StopRequest:
    """A signal handler that records whether the run should stop, and its exit code.

    A first signal raises `SystemExit`, so that context managers clean up; inside
    `deferred` it is only recorded, so that the step can end and be saved. A second
    signal ends the process immediately.
    """

    def __init__(self):
        """Starts without a signal."""
        self._signal: int | None = None
        self._is_deferred = False

    @property
    def is_set(self) -> bool:
        """True after a signal."""
        return self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, else 0."""
        return 0 if self._signal is None else 128 + self._signal

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Makes a first signal within the block only set `is_set`, to be polled."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def __call__(self, number: int, _frame):
        """Handles a signal."""
        if self.is_set:
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)  # a progress bar hides it
            os._exit(128 + number)
        self._signal = number
        if not self._is_deferred:
            raise SystemExit(self.exit_code)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Yields a `StopRequest` that handles Ctrl-C and SIGTERM within the block."""
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
