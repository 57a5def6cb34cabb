"""The kernel of `joined_cast`. Importing this module imports Triton.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from loka_jax.triton.tail_kernel import first_of_tile, load_part, write


@triton.jit
@no_type_check
def joined_cast_kernel(
    first,
    second,
    scale_inv,
    scale_at,
    y,
    y_fp8,
    y_fp8_t,
    amaxes,
    m: tl.constexpr,
    n: tl.constexpr,
    out_m: tl.constexpr,
    out_n: tl.constexpr,
    start: tl.constexpr,
    end: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes `[first; second; zeros]`; the second part is columns start to end."""
    row, column = first_of_tile(out_n, block_m, block_n)
    # fmt: off
    tile = tl.zeros((block_m, block_n), tl.float32)
    if column < start:  # most tiles have columns of one part alone
        tile += load_part(first, row, column, m, 0, start, block_m, block_n)
    if column + block_n > start:
        tile += load_part(second, row, column, m, start, end, block_m, block_n)
    write(
        tile, scale_inv + scale_at, y, y_fp8, y_fp8_t, amaxes, row, column,
        m, n, out_m, out_n, has_bf16, has_fp8, has_fp8_t, has_amax, limit,
        block_m, block_n,
    )
    # fmt: on
