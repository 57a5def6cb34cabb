"""FP8 products by Triton: scales in the epilogue, or block by block of K.

Hopper's FP8 tensor cores want both operands K-major, lhs (M, K) and rhs (N, K). With
s the operands' `scale_inv`, and b the blocks of 128 along K,

    out[m, n] = s_lhs[m] s_rhs[n] sum_k lhs[m, k] rhs[n, k]                      or
    out[m, n] = sum_b s_lhs[m, b] s_rhs[n, b] sum_(k in b) lhs[m, k] rhs[n, k]

Sums are float32. The operands' formats may differ: gradients in E5M2 meet E4M3. Unlike
in XLA, blockwise products run on the FP8 tensor cores, and sizes other than K need not
be multiples of anything.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import Fp8Array
from loka_jax.recipe import BLOCK
from loka_jax.triton.launch import launch, power_of_two, require_triton

_K_MULTIPLE = 16  # bytes of one asynchronous copy
_SMS = 132
# Sums that a thread's registers hold. Where sums of K blocks are added to others, both
# take registers.
_MOST_SUMS = 128
_LEAST_BLOCK_K = 64


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut and pipelined.

    Attributes:
        block_m, block_n: rows and columns of the result that a program makes.
        block_k: how much of K is multiplied at a time; divides 128.
        num_warps: warps of a program.
        num_stages: K blocks in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def sums(self) -> int:
        """Elements of the result that a thread holds."""
        return self.block_m * self.block_n // (32 * self.num_warps)

    def num_programs(self, m: int, n: int) -> int:
        """Returns how many programs make an (m, n) result."""
        return math.ceil(m / self.block_m) * math.ceil(n / self.block_n)


# From large to small: large tiles read the operands less often, small ones are enough
# programs for all multiprocessors.
_TILES = (
    Tiles(128, 256, 128, 8, 3),
    Tiles(256, 128, 128, 8, 3),
    Tiles(128, 128, 128, 8, 4),
    Tiles(128, 128, 64, 8, 4),
    Tiles(64, 128, 128, 4, 4),
    Tiles(64, 128, 64, 4, 4),
    Tiles(128, 64, 128, 4, 4),
    Tiles(128, 64, 64, 4, 4),
    Tiles(64, 64, 128, 4, 5),
    Tiles(64, 64, 64, 4, 5),
    Tiles(64, 32, 128, 4, 5),
    Tiles(64, 32, 64, 4, 5),
    Tiles(64, 16, 128, 4, 5),
    Tiles(64, 16, 64, 4, 5),
)


def why_not(
    m: int, k: int, n: int, *, tiles: Tiles | None = None, one_sum: bool = False
) -> str | None:
    """Returns why an (m, k) x (k, n) product is not served, or None if it is.

    Args:
        m, k, n: in the role's own terms: for drhs, k is the batch.
        tiles: the tiles to serve it with; any if None.
        one_sum: as in `settings`.
    """
    for name, size in (("m", m), ("k", k), ("n", n)):
        if size <= 0:
            return f"{name}={size} is not positive"
    if k % _K_MULTIPLE:
        return f"k={k} is not a multiple of {_K_MULTIPLE}"
    if tiles is not None and tiles not in settings(m, k, n, one_sum=one_sum):
        return f"{tiles} is not among the settings for this product"
    return None


@functools.cache
def settings(m: int, k: int, n: int, *, one_sum: bool = False) -> tuple[Tiles, ...]:
    """Returns the tiles worth measuring for a product, the default ones first.

    Args:
        m, k, n: as in `why_not`.
        one_sum: the tensor core's sums run over all of K: fast accumulation of
            operands that are not tiled. It leaves registers for larger tiles.
    """
    most_sums = _MOST_SUMS if one_sum else _MOST_SUMS // 2
    least = _TILES[-1]
    limit_m = max(power_of_two(m), least.block_m)
    limit_n = max(power_of_two(n), least.block_n)
    limit_k = max(power_of_two(k), _LEAST_BLOCK_K)
    found = [
        t
        for t in _TILES
        if t.block_m <= limit_m
        and t.block_n <= limit_n
        and t.block_k <= limit_k
        and t.sums <= most_sums
    ]
    # The largest that keeps every multiprocessor busy, else the most programs.
    busy = [t for t in found if t.num_programs(m, n) >= _SMS]
    programs = functools.partial(Tiles.num_programs, m=m, n=n)
    default = busy[0] if busy else max(found, key=programs)
    return default, *(t for t in found if t != default)


def fp8_matmul(
    lhs: Fp8Array,
    rhs: Fp8Array,
    *,
    out_dtype: DTypeLike,
    fast_accumulation: bool = False,
    tiles: Tiles | None = None,
) -> Float[Array, "m n"]:
    """Returns `dequantize(lhs) @ dequantize(rhs).T`, multiplied in FP8.

    Deterministic; not differentiable by JAX.

    Args:
        lhs: (m, k), one scale, one per row `[m, 1]`, or tiles 128 wide.
        rhs: (n, k), likewise, and tiled if lhs is.
        out_dtype: of the result, which is rounded once, after it is scaled.
        fast_accumulation: accept the tensor core's narrow sums over all of k. Else, and
            always for tiled operands, they are added in float32 at least every 128.
        tiles: how the product is cut, one of `settings`; the first if None.

    Of tiled operands the product of two scales must be in float32's range.

    Raises:
        ValueError: with the reason if these operands or tiles are not served.
        ImportError: if jax-triton is not installed.
    """
    (m, k), n = lhs.data.shape, rhs.data.shape[0]
    if rhs.data.shape[1] != k:
        raise ValueError(f"{lhs.data.shape=} and {rhs.data.shape=} differ in k.")
    if (lhs.tile is None) != (rhs.tile is None):
        raise ValueError(f"{lhs.tile=} and {rhs.tile=}: tile both operands or none.")
    is_tiled = lhs.tile is not None
    one_sum = fast_accumulation and not is_tiled
    reason = why_not(m, k, n, tiles=tiles, one_sum=one_sum)
    if reason is not None:
        raise ValueError(f"fp8_matmul: {reason}.")
    if tiles is None:
        tiles = settings(m, k, n, one_sum=one_sum)[0]
    constants = dict(
        m=m,
        k=k,
        n=n,
        lhs_rows=_rows_of_scale(lhs),
        rhs_rows=_rows_of_scale(rhs),
        block_m=tiles.block_m,
        block_n=tiles.block_n,
        block_k=tiles.block_k,
    )
    require_triton()
    from loka_jax.triton import matmul_kernel  # not above, for it imports Triton

    if is_tiled:
        kernel = matmul_kernel.fp8_block_matmul_kernel
        constants["scale_block"] = BLOCK
    else:
        kernel = matmul_kernel.fp8_matmul_kernel
        constants["fast_accumulation"] = fast_accumulation
    [out] = launch(
        kernel,
        *(lhs.data, lhs.scale_inv, rhs.data, rhs.scale_inv),
        outputs=[jax.ShapeDtypeStruct((m, n), jnp.dtype(out_dtype))],
        grid=tiles.num_programs(m, n),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        constants=constants,
    )
    return out


def _rows_of_scale(operand: Fp8Array) -> int:
    """Returns how many rows share a scale, 0 if all do.

    Raises:
        ValueError: if the scales have another shape.
    """
    rows, k = operand.data.shape
    shape = operand.scale_inv.shape
    if operand.tile is None:
        if operand.scale_inv.size == 1:
            return 0
        if shape == (rows, 1):
            return 1
        raise ValueError(f"scales of shape {shape}: want [] or {(rows, 1)}.")
    tile_rows, tile_k = operand.tile
    expected = math.ceil(rows / tile_rows), math.ceil(k / tile_k)
    if tile_k != BLOCK or shape != expected:
        raise ValueError(
            f"{operand.tile=} with scales of shape {shape}: want tiles {BLOCK} wide "
            f"and a scale for each."
        )
    return tile_rows
