"""The kernels of `matmul`. Importing this module imports Triton.

A program computes a block_m x block_n tile of `out = lhs rhs^T`. Both operands are read
K-major, as Hopper's FP8 tensor cores require. Rows past the end are read as row 0
and not stored; columns of K past the end are read as zeros.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

from typing import no_type_check

import triton
import triton.language as tl

# Rows of tiles computed together: their lhs, and the rhs of the columns in flight,
# stay in the L2 cache.
_GROUP = tl.constexpr(8)


@triton.jit
@no_type_check
def fp8_matmul_kernel(
    lhs,
    lhs_scale_inv,
    rhs,
    rhs_scale_inv,
    out,
    m: tl.constexpr,
    k: tl.constexpr,
    n: tl.constexpr,
    lhs_rows: tl.constexpr,
    rhs_rows: tl.constexpr,
    fast_accumulation: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Multiplies operands whose scales are constant along K and scale the sum.

    `lhs_rows` and `rhs_rows` are the numbers of rows that share a scale, 0 for all.
    """
    row, column = _first_of_tile(m, n, block_m, block_n)
    lhs_at = _pointers(lhs, row, m, k, block_m, block_k)
    rhs_at = _pointers(rhs, column, n, k, block_n, block_k)
    total = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, k, block_k):
        a = _load(lhs_at + start, start, k, block_k)
        b = _load(rhs_at + start, start, k, block_k)
        if fast_accumulation:
            total = tl.dot(a, b.T, total)
        else:
            # The tensor core's own sums keep few bits: none is longer than a block.
            # With `max_num_imprecise_acc` ptxas would serialize its instructions.
            total += tl.dot(a, b.T)
    # Two multiplications, not one by the product, which could leave float32's range.
    total *= _scales(lhs_scale_inv, row, m, block_m, lhs_rows, 1)[:, None]
    total *= _scales(rhs_scale_inv, column, n, block_n, rhs_rows, 1)[None, :]
    _store(out, total, row, column, m, n, block_m, block_n)


@triton.jit
@no_type_check
def fp8_block_matmul_kernel(
    lhs,
    lhs_scale_inv,
    rhs,
    rhs_scale_inv,
    out,
    m: tl.constexpr,
    k: tl.constexpr,
    n: tl.constexpr,
    lhs_rows: tl.constexpr,
    rhs_rows: tl.constexpr,
    scale_block: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Multiplies operands scaled by tiles of `lhs_rows` or `rhs_rows` by `scale_block`.

    The product of a K block is scaled and then added in float32.
    """
    row, column = _first_of_tile(m, n, block_m, block_n)
    lhs_at = _pointers(lhs, row, m, k, block_m, block_k)
    rhs_at = _pointers(rhs, column, n, k, block_n, block_k)
    scale_blocks: tl.constexpr = (k + scale_block - 1) // scale_block
    total = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, k, block_k):
        # Read before the product, which then hides their latency.
        lhs_scale_at = lhs_scale_inv + start // scale_block
        rhs_scale_at = rhs_scale_inv + start // scale_block
        lhs_scales = _scales(lhs_scale_at, row, m, block_m, lhs_rows, scale_blocks)
        rhs_scales = _scales(rhs_scale_at, column, n, block_n, rhs_rows, scale_blocks)
        a = _load(lhs_at + start, start, k, block_k)
        b = _load(rhs_at + start, start, k, block_k)
        total += tl.dot(a, b.T) * (lhs_scales[:, None] * rhs_scales[None, :])
    _store(out, total, row, column, m, n, block_m, block_n)


@triton.jit
@no_type_check
def _first_of_tile(
    m: tl.constexpr, n: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr
):
    """Returns the first row and column of this program's tile of the result."""
    tiles_m: tl.constexpr = (m + block_m - 1) // block_m
    tiles_n: tl.constexpr = (n + block_n - 1) // block_n
    program = tl.program_id(0)
    first = program // (_GROUP * tiles_n) * _GROUP
    group = tl.minimum(tiles_m - first, _GROUP)
    place = program % (_GROUP * tiles_n)
    return (first + place % group) * block_m, place // group * block_n


@triton.jit
@no_type_check
def _rows(first, size: tl.constexpr, block: tl.constexpr):
    """Returns `block` rows from the first on, row 0 in place of those past the end."""
    rows = first + tl.arange(0, block)
    return tl.where(rows < size, rows, 0)


@triton.jit
@no_type_check
def _pointers(
    operand,
    first,
    size: tl.constexpr,
    k: tl.constexpr,
    block: tl.constexpr,
    block_k: tl.constexpr,
):
    """Returns pointers to the first K block of a tile's rows of an operand."""
    # Beyond 2^31 elements the offsets of rows need 64 bits.
    rows = _rows(first, size, block).to(tl.int64)
    return operand + rows[:, None] * k + tl.arange(0, block_k)[None, :]


@triton.jit
@no_type_check
def _load(at, start, k: tl.constexpr, block_k: tl.constexpr):
    """Returns an operand's K block that begins at `start`."""
    if k % block_k == 0:
        return tl.load(at)
    else:
        inside = tl.arange(0, block_k) < k - start
        return tl.load(at, mask=inside[None, :], other=0.0)


@triton.jit
@no_type_check
def _scales(
    scale_inv,
    first,
    size: tl.constexpr,
    block: tl.constexpr,
    shared: tl.constexpr,
    stride: tl.constexpr,
):
    """Returns the scales of a tile's rows, a single one if the tile shares it.

    `shared` rows share a scale, all if it is 0; the next scale is `stride` further.
    """
    if shared == 0:
        return tl.load(scale_inv + tl.arange(0, 1))
    elif shared % block == 0:
        return tl.load(scale_inv + first // shared * stride + tl.arange(0, 1))
    else:
        return tl.load(scale_inv + _rows(first, size, block) // shared * stride)


@triton.jit
@no_type_check
def _store(
    out,
    tile,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes a tile of the result in the dtype of `out`."""
    rows = row + tl.arange(0, block_m)
    columns = column + tl.arange(0, block_n)
    at = out + rows[:, None].to(tl.int64) * n + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(at, tile.to(out.dtype.element_ty), mask=inside)
