"""Shared parts of the Mosaic GPU kernels: row tiles, shared memory, stores of a tile.

A row tile has 64 rows, the height of one `wgmma`. Arrays in registers have its
accumulator layout; a value per row or per column is broadcast to a tile explicitly,
because Mosaic has no implicit broadcasting.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from loka_jax.fp8 import E4M3, fp8_max

ROWS = 64  # of a row tile: the height of a wgmma
TMA_SIDE = 256  # largest dim of a TMA copy
SMEM_BYTES = 232_448  # most shared memory of a CTA on Hopper
SMS = 132  # of an H100 or H200
_SMEM_ALIGNMENT = 1024

PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def lowered_once(launch: Callable[[Any, Any, Any], Any]) -> Any:
    """Returns a launch that is lowered once in a program that calls it many times.

    Mosaic takes a second or two to lower a kernel, and a model of many layers has the
    same one in each.

    Args:
        launch: takes what the kernel depends on, hashable, a tree of arrays, and how
            to interpret the kernel.
    """
    return jax.jit(launch, static_argnums=(0, 2))


def swizzled(shape: tuple[int, ...], dtype: DTypeLike, *, columns: int | None = None):
    """Returns a shared-memory type in the tiled, swizzled form of TMA and `wgmma`.

    Args:
        columns: of a tile, which the operands of a `wgmma` must share: 32, 64 or 128
            bytes; by default as many as divide the rows.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle((columns or shape[-1]) * itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # pyright: ignore
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # pyright: ignore
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def row_scale_inv(amax: jax.Array, least: float) -> jax.Array:
    """Returns the power-of-two `scale_inv` of rows with these amaxes, as in `fp8`.

    At least `least`; NaN or infinite where the amax is, so that faulty rows show.
    """
    scale_inv = jnp.maximum(amax * (1 / fp8_max(E4M3)), least)
    # Rounds up to a power of two.
    bits = lax.bitcast_convert_type(scale_inv, jnp.int32) + 0x007FFFFF
    return lax.bitcast_convert_type(bits & 0x7F800000, jnp.float32)


def accumulator(rows: int, columns: int):
    """Returns the type of a product's float32 accumulator in registers."""
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def shared_memory_bytes(scratch: Iterable[Any]) -> int:
    """Returns the bytes of the arrays and barriers that are not None.

    Every array starts at a multiple of 1 KiB.
    """
    total = 0
    for item in scratch:
        if isinstance(item, plgpu.Barrier):
            total += 8 * int(np.prod(item.num_barriers))
        elif item is not None:
            size = item.inner_aval.size * item.inner_aval.dtype.itemsize
            total += -(-size // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT
    return total


def per_row(values: jax.Array, columns: int) -> jax.Array:
    """Returns a tile whose row r holds `values[r]`."""
    return lax.broadcast_in_dim(values, (values.shape[0], columns), (0,))


def per_column(values: jax.Array, rows: int = ROWS) -> jax.Array:
    """Returns a tile whose column c holds `values[c]`."""
    return lax.broadcast_in_dim(values, (rows, values.shape[0]), (1,))


# A launch divides at most 64 Ki registers evenly among a CTA's threads, in units of 8.
# The producer warpgroup releases most of its registers and the consumers take them:
# asking for more than were released deadlocks.
_REGISTERS = {1: 240, 2: 240, 3: 160, 4: 112}
PRODUCER_REGISTERS = 24


def consumer_registers(consumers: int) -> int:
    """Returns the registers per thread of each of some consumer warpgroups."""
    return _REGISTERS[consumers]


def compiler_params() -> plgpu.CompilerParams:
    """Returns the compiler parameters of all kernels.

    No automatic barriers: every kernel orders its accesses to shared memory itself.
    No scratch for reductions: sums along rows stay within a warp.
    """
    return plgpu.CompilerParams(
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        reduction_scratch_bytes=0,
        unsafe_no_auto_barriers=True,
    )


class RowStore:
    """Writes register tiles to global memory by subtiles, staged in shared memory.

    Belongs to one warpgroup. Make a new one for every row tile, after `drain`.
    """

    def __init__(self, staging):
        """Takes a reference to shared memory, (stages, 64, columns of a subtile)."""
        self._staging = staging
        self._stored = 0

    def __call__(self, tile: jax.Array, target, rows, first_column):
        """Starts copying `tile` to `target[rows, first_column:]`.

        Call `drain` before the kernel ends.
        """
        stages, _, columns = self._staging.shape
        for start in range(0, tile.shape[1], columns):
            stage = self._stored % stages
            if self._stored >= stages:
                plgpu.wait_smem_to_gmem(stages - 1, wait_read_only=True)
            self._staging[stage] = tile[:, start : start + columns]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                self._staging.at[stage],
                target.at[rows, pl.ds(first_column + start, columns)],
            )
            self._stored += 1


def drain():
    """Waits until all stores of this warpgroup have left shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
