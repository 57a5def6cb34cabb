"""A profiler trace of a few training steps, `--profile START:STEPS`."""

import pathlib

import jax


class Profiler:
    """Traces the steps of a range into a folder, for XProf or Perfetto."""

    def __init__(self, steps: range, directory: pathlib.Path):
        """Traces nothing yet; an empty range traces nothing ever."""
        self._steps = steps
        self._directory = directory
        self._is_tracing = False

    def before(self, step: int):
        """Starts the trace if `step` is its first."""
        if step in self._steps and not self._is_tracing:
            jax.profiler.start_trace(str(self._directory))
            self._is_tracing = True

    def after(self, step: int, state):
        """Ends the trace if `step` was its last; waits for `state` first."""
        if self._is_tracing and step + 1 not in self._steps:
            jax.block_until_ready(state)
            self.close()

    def close(self):
        """Ends the trace if one is being made."""
        if self._is_tracing:
            jax.profiler.stop_trace()
            self._is_tracing = False
