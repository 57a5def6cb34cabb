"""The training time of a session, and its examples per second."""

import dataclasses
import time

import jax

from loka_jax.train.host_state import Progress
from loka_jax.train.state import TrainState


class Clock:
    """Measures training time, without evaluations and checkpoints."""

    def __init__(self, progress: Progress):
        """Starts at the progress of a run that begins or resumes."""
        self._since = time.perf_counter()
        self._marked = progress
        self._first: Progress | None = None

    def restart(self) -> None:
        """Leaves out the time since the last `tick`."""
        self._since = time.perf_counter()

    def rewind(self, progress: Progress) -> None:
        """Makes the next `rate` one since `progress`."""
        self._marked = progress

    def tick(self, state: TrainState, progress: Progress) -> Progress:
        """Waits for the device; returns the progress with the time since added."""
        jax.block_until_ready(state.step)
        before, self._since = self._since, time.perf_counter()
        seconds = progress.seconds + self._since - before
        return dataclasses.replace(progress, seconds=seconds)

    def rate(self, progress: Progress) -> float:
        """Returns the examples per second since the last `mark` or `rewind`."""
        elapsed = max(progress.seconds - self._marked.seconds, 1e-9)
        return (progress.examples - self._marked.examples) / elapsed

    def mark(self, progress: Progress) -> None:
        """Makes the next `rate` one since `progress`, which is of a log line."""
        self._marked = progress
        self._first = self._first or progress

    def session_rate(self, progress: Progress) -> float | None:
        """Returns the examples per second since the first `mark`, or None before it.

        What precedes that is mostly compilation.
        """
        if self._first is None or progress.seconds <= self._first.seconds:
            return None
        elapsed = progress.seconds - self._first.seconds
        return (progress.examples - self._first.examples) / elapsed
