"""The kernels of `joined_norm`. Importing this module imports Triton.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def joined_norm_kernel(
    part,
    x,
    y_before,
    rstd_before,
    y,
    rstd,
    rows: tl.constexpr,
    count: tl.constexpr,
    first: tl.constexpr,
    n: tl.constexpr,
    d: tl.constexpr,
    epsilon: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes `norm(part + x)` to the part's rows of y, and their rstd."""
    row, to, columns, inside = _rows(rows, count, first, n, d, block_m, block_n)
    at = to[:, None] * d + columns
    v = tl.load(part + row[:, None] * d + columns, mask=inside, other=0.0)
    v = v.to(tl.float32)
    v += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    rate = tl.rsqrt(tl.sum(v * v, axis=1) / d + epsilon)
    v *= rate[:, None]
    tl.store(y + at, v.to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + to, rate, mask=row < rows)


@triton.jit
@no_type_check
def joined_norm_backward_kernel(
    dy,
    y,
    rstd,
    dx_before,
    dx,
    dpart,
    rows: tl.constexpr,
    count: tl.constexpr,
    first: tl.constexpr,
    n: tl.constexpr,
    d: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes the gradient of the sum to the part's rows of dx, and to dpart."""
    row, to, columns, inside = _rows(rows, count, first, n, d, block_m, block_n)
    g = _gradient(dy, y, rstd, to, columns, inside, row < rows, d)
    g = g.to(dx.dtype.element_ty)
    tl.store(dx + to[:, None] * d + columns, g, mask=inside)
    tl.store(dpart + row[:, None] * d + columns, g, mask=inside)


@triton.jit
@no_type_check
def joined_norm_parts_backward_kernel(
    dy,
    y,
    rstd,
    dpart,
    rows: tl.constexpr,
    count: tl.constexpr,
    first: tl.constexpr,
    n: tl.constexpr,
    d: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes the gradient of the sum to dpart alone."""
    row, to, columns, inside = _rows(rows, count, first, n, d, block_m, block_n)
    g = _gradient(dy, y, rstd, to, columns, inside, row < rows, d)
    at = row[:, None] * d + columns
    tl.store(dpart + at, g.to(dpart.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _gradient(dy, y, rstd, to, columns, inside, is_row, d: tl.constexpr):
    """Returns the gradient of the sum at some rows of the whole, in float32."""
    at = to[:, None] * d + columns
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(rstd + to, mask=is_row, other=0.0)
    return (g - v * (tl.sum(g * v, axis=1) / d)[:, None]) * rate[:, None]


@triton.jit
@no_type_check
def _rows(
    rows: tl.constexpr,
    count: tl.constexpr,
    first: tl.constexpr,
    n: tl.constexpr,
    d: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns rows of a part, those of the whole, columns, and what lies inside."""
    # Beyond 2^31 elements offsets need 64 bits.
    row = tl.program_id(0).to(tl.int64) * block_m + tl.arange(0, block_m)
    to = row // count * n + first + row % count
    columns = tl.arange(0, block_n)[None, :]
    return row, to, columns, (row < rows)[:, None] & (columns < d)
