"""Mosaic's GPU interpreter with its race detector: the one import of `jax._src`."""

import contextlib

import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.pallas import tiles


@contextlib.contextmanager
def interpreter(sms=2):
    """Yields parameters that interpret kernels, on few SMs so that each walks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "SMS", sms)
        interpret_pallas_call.reset_gpu_interpret_mode_state()
        yield plgpu.InterpretGPUParams(detect_races=True)
        interpret_pallas_call.reset_gpu_interpret_mode_state()


def assert_no_races():
    """Asserts that kernels ran in the interpreter, without a race."""
    assert not interpret_pallas_call.get_races().races_found
