"""Training time, examples per second without compilation, and traces of steps.

    examples/s = examples / seconds        over the steps since the last compilation

of a window between two log lines. The device is waited for where a log line waits
anyway, and after a step in which something was compiled.
"""

import dataclasses
import functools
import pathlib
import time
import types

import jax

from loka_jax import compat
from loka_jax.train.state import TrainState
from loka_jax.train.watch.host_state import Progress


class Clock:
    """Measures training time, without evaluations and checkpoints."""

    def __init__(self, progress: Progress):
        """Starts at the progress of a run that begins or resumes."""
        self._compiled = _compilations()
        self._count = self._compiled.count
        self._compiled_before = self._compiled.seconds
        self._since = time.perf_counter()
        self._marked = progress
        self._examples, self._seconds = 0, 0.0

    def restart(self) -> None:
        """Leaves out the time since the last `tick`, and what was compiled in it."""
        self._since = time.perf_counter()
        self._count = self._compiled.count

    def rewind(self, progress: Progress) -> None:
        """Leaves out of all rates what was since the last `mark` or `rewind`."""
        self._marked = progress

    def tick(self, state: TrainState, progress: Progress) -> Progress:
        """Waits for the device; returns the progress with the time since added."""
        jax.block_until_ready(state.step)
        before, self._since = self._since, time.perf_counter()
        seconds = progress.seconds + self._since - before
        return dataclasses.replace(progress, seconds=seconds)

    def has_compiled(self) -> bool:
        """Returns whether anything was compiled since the last call or `restart`."""
        before, self._count = self._count, self._compiled.count
        return self._count != before

    def compile_seconds(self) -> float:
        """Returns the seconds that all threads lowered and compiled since the start."""
        return self._compiled.seconds - self._compiled_before

    def rate(self, progress: Progress) -> float | None:
        """Returns the examples per second since the last `mark` or `rewind`, if any."""
        return _rate(*self._elapsed(progress))

    def mark(self, progress: Progress) -> None:
        """Begins a window, and adds the one before to the rate of the session."""
        examples, seconds = self._elapsed(progress)
        self._examples += examples
        self._seconds += seconds
        self._marked = progress

    def session_rate(self, progress: Progress) -> float | None:
        """Returns the examples per second of all windows; None without a step."""
        examples, seconds = self._elapsed(progress)
        return _rate(self._examples + examples, self._seconds + seconds)

    def _elapsed(self, progress: Progress) -> tuple[int, float]:
        marked = self._marked
        return progress.examples - marked.examples, progress.seconds - marked.seconds


def _rate(examples: int, seconds: float) -> float | None:
    return examples / seconds if examples and seconds > 0 else None


@functools.cache
def _compilations() -> types.SimpleNamespace:
    """Returns how many programs this process compiles from now on, and their time."""
    found = types.SimpleNamespace(count=0, seconds=0.0)

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        found.count += event == compat.COMPILATION_EVENT
        if event in (compat.LOWERING_EVENT, compat.COMPILATION_EVENT):
            found.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    return found


class Profiler:
    """Traces a range of steps into a folder, for XProf or Perfetto (`--profile`)."""

    def __init__(self, steps: range, directory: pathlib.Path):
        self._steps = steps
        self._directory = directory
        self._is_tracing = False

    def before(self, step: int):
        """Starts the trace before its first step."""
        if step in self._steps and not self._is_tracing:
            jax.profiler.start_trace(str(self._directory))
            self._is_tracing = True

    def after(self, step: int, state):
        """Ends the trace after its last step, when `state` is computed."""
        if self._is_tracing and step + 1 not in self._steps:
            jax.block_until_ready(state)
            self.close()

    def close(self):
        """Ends the trace if it is running."""
        if self._is_tracing:
            jax.profiler.stop_trace()
            self._is_tracing = False
