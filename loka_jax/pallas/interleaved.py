"""Scores in FP8 as an operand of the next `wgmma`, from the registers they are in.

Of 16 columns a thread t of four has, of the scores that a `wgmma` returns, two of the
first eight and two of the others, `8 b + 2 t + i`; an operand in 8 bits takes four in a
row, `4 t + 2 b + i`. So the rows that scores are columns of come in another order, and
nothing moves. (FlashAttention-3 permutes for the same reason, arXiv 2407.08608, 3.3.)
"""

from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu


def interleave(x: jax.Array) -> jax.Array:
    """Returns x with row `4 t + 2 b + i` of each 16 in place `8 b + 2 t + i`."""
    parts = x.reshape(-1, 4, 2, 2, *x.shape[1:])
    return parts.swapaxes(1, 2).reshape(x.shape)


def row_of(place: jax.Array) -> jax.Array:
    """Returns the row in each place of what `interleave` returns."""
    return (place & ~14) | ((place & 6) << 1) | ((place & 8) >> 2)


def columns_in_order(x: jax.Array) -> jax.Array:
    """Returns x whose columns are interleaved with its columns in order."""
    parts = x.reshape(x.shape[0], -1, 2, 4, 2)
    return parts.swapaxes(2, 3).reshape(x.shape)


def as_operand(x: jax.Array) -> jax.Array:
    """Returns the same in a kernel, as `wgmma` takes it: no register changes."""
    layouts: Any = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_8BIT

    @plgpu.inline_mgpu(
        arg_types=layouts[:1],
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layouts[1]),
    )
    def relabeled(_, array):
        layout = layouts[1].to_mgpu()
        shape = layout.registers_shape(array.shape)
        pairs = array.registers.reshape(shape[0], shape[1], 2, *shape[2:])
        registers = np.empty(shape, object)
        for place in np.ndindex(shape):
            halves = [pairs[place[0], place[1], b, *place[2:]] for b in range(2)]
            registers[place] = mgpu.utils.vector_concat(halves)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=layout, _is_signed=None
        )

    return relabeled(x)  # pyright: ignore
