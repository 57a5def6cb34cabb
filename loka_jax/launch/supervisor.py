"""Waits for the processes of a job, and ends all of them when one fails.

all end with 0           0
one dies or fails        SIGTERM to the others, 5 s, SIGKILL; 1 (2 if it said so)
Ctrl-C, SIGTERM          passed on, so that all save the same step; 130, 143
  before all have begun  as if one had failed; 130, 143
  one is left behind     a minute after another has ended, as if it had failed; 130, 143
a second signal          SIGKILL to all; 130, 143
"""

import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from loka_jax.launch.processes import Processes

_STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM}  # by a signal, after saving
_USAGE = 2
_POLL_SECONDS = 0.05
# From the end of the first process of a stopped job to that of the last. All have saved
# the same step by then; one that misses another may wait for it for ever.
_GRACE_SECONDS = 60.0


class End(NamedTuple):
    """How a job ended.

    Attributes:
        code: the exit code of the job.
        rank: the process that failed first; None if none did.
        exit_code: of that process, minus the signal that killed it.
        stuck: the processes that were held by SIGSTOP then.
        late: those of a stopped job that had not ended with the others.
    """

    code: int
    rank: int | None = None
    exit_code: int = 0
    stuck: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


class Supervisor:
    """Waits for processes; signals to this one are theirs."""

    def __init__(self, processes: Processes, grace_s: float = _GRACE_SECONDS):
        """Handles Ctrl-C and SIGTERM from now on, also while they are started."""
        self._processes, self._grace_s = processes, grace_s
        self._first_end: float | None = None
        self._signal: int | None = None
        self._is_over = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def wait(self) -> End:
        """Returns how the job ended; what still runs then is to be ended."""
        while True:
            codes = self._processes.exit_codes()
            if self._is_over:
                return End(self._stop_code(codes))
            is_stopping = self._signal is not None
            if (rank := to_blame(codes, is_stopping=is_stopping)) is not None:
                code = codes[rank]
                assert code is not None
                stuck = tuple(self._processes.stopped())
                return End(2 if code == _USAGE else 1, rank, code, stuck)
            if None not in codes:
                return End(self._stop_code(codes) if any(codes) else 0)
            if is_stopping and self._is_late(codes):
                late = tuple(rank for rank, code in enumerate(codes) if code is None)
                return End(self._stop_code(codes), late=late)
            time.sleep(_POLL_SECONDS)

    def _is_late(self, codes: Sequence[int | None]) -> bool:
        """Returns whether the first process has ended too long ago for the others."""
        if self._first_end is None and any(code is not None for code in codes):
            self._first_end = time.monotonic()
        first = self._first_end
        return first is not None and time.monotonic() - first > self._grace_s

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._signal is not None:
            self._is_over = True
            self._processes.kill()
            return
        self._signal = number
        if not self._processes.are_started():  # there is nothing to save
            self._is_over = True
            return
        # As Ctrl-C in any case: SIGTERM is JAX's own in a process of several.
        self._processes.send(signal.SIGINT)

    def _stop_code(self, codes: Sequence[int | None]) -> int:
        if self._signal is not None:
            return 128 + self._signal
        return max(code or 0 for code in codes)


def to_blame(codes: Sequence[int | None], *, is_stopping: bool) -> int | None:
    """Returns the rank of the process that failed first, or None if none has failed.

    Of several that have, it is one that was killed: the others failed for want of it.
    JAX aborts a process that misses another one, so such a one is the last to blame.

    Args:
        is_stopping: a signal was passed on, so that it may have ended some.
    """
    fine = {0, None, *_STOPPED}
    if is_stopping:
        fine |= {-signal.SIGINT, -signal.SIGTERM, -signal.SIGABRT}

    def place(rank: int) -> int:
        code = codes[rank] or 0
        if code == -signal.SIGABRT:
            return 2
        return 0 if code < 0 else 1

    failed = [rank for rank, code in enumerate(codes) if code not in fine]
    return min(failed, key=place, default=None)
