"""A profiler trace of some training steps: `--profile START:STEPS`."""

import pathlib

import jax


class Profiler:
    """Traces a range of steps into a folder, for XProf or Perfetto."""

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
