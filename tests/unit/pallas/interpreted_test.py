"""The kernels that work by rows, interpreted, forward and backward."""

import functools

from loka_jax.fp8 import E4M3
from loka_jax.normed import Epilogue
from loka_jax.pallas.norm_backward import norm_backward
from loka_jax.pallas.norm_quantize import norm_quantize
from loka_jax.pallas.rows import TuningConfig
from tests.support import pallas as support
from tests.support import row_kernels
from tests.support.pallas import interpret

__all__ = ["interpret"]

# Nine tiles of rows, the last of which repeats some, for two SMs.
M, N, CONFIG = 68, 128, TuningConfig(rows=2, pipeline_stages=1, warpgroups=1)


def test_rows_are_normalized_quantized_and_differentiated(interpret):
    run = functools.partial(support.interpreted, interpret=interpret)
    want, epilogue = row_kernels.ROW_SCALES, Epilogue("layer", "swish")
    row_kernels.check_rows(run(norm_quantize), M, N, "layer", "swish", want, CONFIG)
    row_kernels.check_gradients(run(norm_backward), M, N, epilogue, E4M3, CONFIG)
