"""Handles Ctrl-C and SIGTERM: between two steps while training, else immediately.

Several processes must stop after the same step. JAX finds one, and takes SIGTERM for
that: from `jax.distributed.initialize` on Python does not see it. So Ctrl-C becomes
SIGTERM while training, and SIGTERM before training is obeyed after the first steps.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jax.experimental.multihost_utils import reached_preemption_sync_point

_SHOW_CURSOR = b"\x1b[?25h\n"
# Seconds within which the same signal counts once: timeout(1) sends its signal to the
# process, then to the process group.
_ONE_SIGNAL_S = 0.1


class StopRequest:
    """A signal handler that records whether the run should stop, and its exit code.

    A first signal raises `SystemExit`, so that context managers clean up; inside
    `deferred` it is only recorded, so that the step can end and be saved. A second
    signal, at least 0.1 s later, ends the process immediately.

    A signal to one of several processes is for all of them, which stop after the same
    step.
    """

    def __init__(self, processes: int = 1):
        self._has_others = processes > 1
        self._signal: int | None = None
        self._came_at = 0.0
        self._is_deferred = False
        self._is_agreed = False
        self._polls = 0

    @property
    def is_set(self) -> bool:
        """True after a signal, of several processes once all stop."""
        return self._is_agreed if self._has_others else self._signal is not None

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM or another process's signal, else 0."""
        return 128 + (self._signal or signal.SIGTERM) if self.is_set else 0

    def reached(self) -> bool:
        """Returns whether to stop here; all processes ask at the same places."""
        if self._has_others and not self._is_agreed:
            # Processes agree on the next number after the highest, so that none may be
            # left out: not steps, of which a call may take several.
            self._polls += 1
            self._is_agreed = reached_preemption_sync_point(self._polls)
        return self.is_set

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Makes a first signal within the block only set `is_set`, to be polled."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Lets a first signal within the block raise `SystemExit` at its end."""
        with self.deferred():
            yield
        if self._signal is not None:
            raise SystemExit(128 + self._signal)

    def __call__(self, number: int, _frame):
        """Handles a signal."""
        now = time.monotonic()
        if number == self._signal and now - self._came_at < _ONE_SIGNAL_S:
            return
        if self._signal is not None:
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)  # a progress bar hides it
            os._exit(128 + number)
        self._signal, self._came_at = number, now
        if not self._is_deferred:
            raise SystemExit(128 + number)
        if self._has_others:
            os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def stop_on_signals(processes: int = 1) -> Iterator[StopRequest]:
    """Yields a `StopRequest` that handles Ctrl-C and SIGTERM within the block.

    Args:
        processes: of the run, connected already; if there are several, JAX handles
            SIGTERM.
    """
    request = StopRequest(processes)
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may handle signals
        return
    numbers = (signal.SIGINT, signal.SIGTERM)[: 2 if processes == 1 else 1]
    before = [signal.signal(number, request) for number in numbers]
    try:
        yield request
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
