"""FP8 products by Triton: scales in the epilogue, or for each block of K.

Hopper's FP8 tensor cores take both operands K-major, lhs (M, K) and rhs (N, K). With
s the operands' `scale_inv`, and b the blocks of 128 along K,

    out[m, n] = s_lhs[m] s_rhs[n] sum_k lhs[m, k] rhs[n, k]                      or
    out[m, n] = sum_b s_lhs[m, b] s_rhs[n, b] sum_(k in b) lhs[m, k] rhs[n, k]

Sums are float32. The operands' formats may differ: gradients may be in E5M2. Unlike in
XLA, blockwise products run on the FP8 tensor cores, and only K has a multiple, 16.
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
# Sums that a thread's registers hold. Where the sums of K blocks are added in float32,
# both the block's sums and the total take registers.
_MOST_SUMS = 128
_MIN_BLOCK_K = 64


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """The tunable parameters of a product.

    Attributes:
        block_k: columns of K that are multiplied at a time; divides 128.
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
        """Returns how many programs compute an (m, n) result."""
        return math.ceil(m / self.block_m) * math.ceil(n / self.block_n)


# From large to small blocks: large ones read the operands less often, small ones give
# every multiprocessor a program.
_CONFIGS = (
    TuningConfig(128, 256, 128, 8, 3),
    TuningConfig(256, 128, 128, 8, 3),
    TuningConfig(128, 128, 128, 8, 4),
    TuningConfig(128, 128, 64, 8, 4),
    TuningConfig(64, 128, 128, 4, 4),
    TuningConfig(64, 128, 64, 4, 4),
    TuningConfig(128, 64, 128, 4, 4),
    TuningConfig(128, 64, 64, 4, 4),
    TuningConfig(64, 64, 128, 4, 5),
    TuningConfig(64, 64, 64, 4, 5),
    TuningConfig(64, 32, 128, 4, 5),
    TuningConfig(64, 32, 64, 4, 5),
    TuningConfig(64, 16, 128, 4, 5),
    TuningConfig(64, 16, 64, 4, 5),
)


def why_not(
    m: int, k: int, n: int, *, config: TuningConfig | None = None, one_sum: bool = False
) -> str | None:
    """Returns why an (m, k) x (k, n) product is not served, or None if it is.

    Args:
        m, k, n: of the role's product: for drhs, k is the batch.
    """
    for name, size in (("m", m), ("k", k), ("n", n)):
        if size <= 0:
            return f"{name}={size} is not positive"
    if k % _K_MULTIPLE:
        return f"k={k} is not a multiple of {_K_MULTIPLE}"
    if config is not None and config not in search_space(m, k, n, one_sum=one_sum):
        return f"{config} is not in the search space of this product"
    return None


@functools.cache
def search_space(
    m: int, k: int, n: int, *, one_sum: bool = False
) -> tuple[TuningConfig, ...]:
    """Returns the configs worth measuring for a product, the default one first.

    Args:
        one_sum: the tensor core's sums run over all of K: fast accumulation of
            operands that are not tiled. It leaves registers for larger blocks.
    """
    most_sums = _MOST_SUMS if one_sum else _MOST_SUMS // 2
    smallest = _CONFIGS[-1]
    limit_m = max(power_of_two(m), smallest.block_m)
    limit_n = max(power_of_two(n), smallest.block_n)
    limit_k = max(power_of_two(k), _MIN_BLOCK_K)
    space = [
        c
        for c in _CONFIGS
        if c.block_m <= limit_m
        and c.block_n <= limit_n
        and c.block_k <= limit_k
        and c.sums <= most_sums
    ]
    # The largest that keeps every multiprocessor busy, else the most programs.
    busy = [c for c in space if c.num_programs(m, n) >= _SMS]
    programs = functools.partial(TuningConfig.num_programs, m=m, n=n)
    default = busy[0] if busy else max(space, key=programs)
    return default, *(c for c in space if c != default)


def fp8_matmul(
    lhs: Fp8Array,
    rhs: Fp8Array,
    *,
    out_dtype: DTypeLike,
    fast_accumulation: bool = False,
    config: TuningConfig | None = None,
) -> Float[Array, "m n"]:
    """Returns `dequantize(lhs) @ dequantize(rhs).T`, multiplied in FP8.

    Deterministic; not differentiable by JAX.

    Args:
        lhs: (m, k), one scale, one per row `[m, 1]`, or tiles 128 wide.
        rhs: (n, k), likewise, and tiled if lhs is. The product of two scales of tiles
            must be in float32's range.
        out_dtype: of the result, which is rounded once, after it is scaled.
        fast_accumulation: accept the tensor core's low-precision sums over all of k.
            Else, and always for tiled operands, they are added in float32 at least
            every 128.
        config: the tuning config, one of `search_space`; the first if None.

    Raises:
        ValueError: if these operands or this config are not served.
        ImportError: if jax-triton is not installed.
    """
    (m, k), n = lhs.data.shape, rhs.data.shape[0]
    if rhs.data.shape[1] != k:
        raise ValueError(f"{lhs.data.shape=} and {rhs.data.shape=} differ in k.")
    if (lhs.tile is None) != (rhs.tile is None):
        raise ValueError(f"{lhs.tile=} and {rhs.tile=}: tile both operands or none.")
    is_tiled = lhs.tile is not None
    one_sum = fast_accumulation and not is_tiled
    reason = why_not(m, k, n, config=config, one_sum=one_sum)
    if reason is not None:
        raise ValueError(f"fp8_matmul: {reason}.")
    config = config or search_space(m, k, n, one_sum=one_sum)[0]
    constants = dict(
        m=m,
        k=k,
        n=n,
        lhs_rows=_rows_of_scale(lhs),
        rhs_rows=_rows_of_scale(rhs),
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=config.block_k,
    )
    require_triton()
    from loka_jax.triton import matmul_kernel  # not above: it imports Triton

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
        grid=config.num_programs(m, n),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=constants,
    )
    return out


def _rows_of_scale(operand: Fp8Array) -> int:
    """Returns how many rows share a scale; 0 if all do.

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
        raise ValueError(f"scales of shape {shape} must have shape [] or {(rows, 1)}.")
    tile_rows, tile_k = operand.tile
    expected = math.ceil(rows / tile_rows), math.ceil(k / tile_k)
    if tile_k != BLOCK or shape != expected:
        raise ValueError(
            f"{operand.tile=} with scales of shape {shape}: tiles must be {BLOCK} "
            "wide, with a scale for each."
        )
    return tile_rows
