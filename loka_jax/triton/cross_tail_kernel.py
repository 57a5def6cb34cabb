"""The kernel of `cross_tail`. Importing this module imports Triton.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from loka_jax.triton.tail_kernel import (
    cut,
    first_of_tile,
    read,
    read_vector,
    scaled,
    store,
    store_dots,
    store_sums,
    write,
)


@triton.jit
@no_type_check
def cross_tail_kernel(
    outer_column,
    outer_row,
    z_0,
    z_0_scale,
    z_0_at,
    z_0_scale_2,
    z_0_at_2,
    z_1,
    z_1_scale,
    z_1_at,
    z_1_scale_2,
    z_1_at_2,
    z_2,
    z_2_scale,
    z_2_at,
    z_2_scale_2,
    z_2_at_2,
    x0,
    x0_scale,
    x0_at,
    x0_scale_2,
    x0_at_2,
    bias,
    head,
    y_scale_inv,
    y_at,
    y,
    y_fp8,
    y_fp8_t,
    amaxes,
    s,
    row_sums,
    dots,
    m: tl.constexpr,
    n: tl.constexpr,
    out_m: tl.constexpr,
    out_n: tl.constexpr,
    has_outer: tl.constexpr,
    z_0_n: tl.constexpr,
    z_0_scales: tl.constexpr,
    z_0_unit: tl.constexpr,
    z_1_n: tl.constexpr,
    z_1_scales: tl.constexpr,
    z_1_unit: tl.constexpr,
    z_2_n: tl.constexpr,
    z_2_scales: tl.constexpr,
    z_2_unit: tl.constexpr,
    x0_n: tl.constexpr,
    x0_scales: tl.constexpr,
    x0_unit: tl.constexpr,
    has_bias: tl.constexpr,
    has_head: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    has_s: tl.constexpr,
    has_row_sum: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes `s = outer + z_0 + z_1 + z_2 + bias`, `y = x0 * s`, and sums of y.

    Of its rows partial sums, and of its columns, each times a weight of the head.
    """
    row, column = first_of_tile(out_n, block_m, block_n)
    c = tl.zeros((block_m, block_n), tl.float32)
    if has_outer:
        c += (
            read_vector(outer_column, row, m, block_m)[:, None]
            * (read_vector(outer_row, column, n, block_n)[None, :])
        )
    if z_0_scales >= 0:
        other = read(z_0, row, column, m, z_0_n, block_m, block_n)
        c += scaled(
            other, z_0_scale + z_0_at, z_0_scale_2 + z_0_at_2, z_0_scales, z_0_unit
        )
    if z_1_scales >= 0:
        other = read(z_1, row, column, m, z_1_n, block_m, block_n)
        c += scaled(
            other, z_1_scale + z_1_at, z_1_scale_2 + z_1_at_2, z_1_scales, z_1_unit
        )
    if z_2_scales >= 0:
        other = read(z_2, row, column, m, z_2_n, block_m, block_n)
        c += scaled(
            other, z_2_scale + z_2_at, z_2_scale_2 + z_2_at_2, z_2_scales, z_2_unit
        )
    if has_bias:
        c += read_vector(bias, column, n, block_n)[None, :]
    if has_s:
        kept = cut(c, row, column, m, n, block_m, block_n)
        store(s, kept, row, column, out_m, out_n, block_m, block_n)
    tile = read(x0, row, column, m, x0_n, block_m, block_n)
    tile = c * scaled(tile, x0_scale + x0_at, x0_scale_2 + x0_at_2, x0_scales, x0_unit)
    if has_row_sum:
        store_sums(row_sums, tile, row, column, n, block_m, block_n)
    if has_head:
        store_dots(dots, tile, head, row, column, m, n, block_m, block_n)
    # fmt: off
    write(
        tile, y_scale_inv + y_at, y, y_fp8, y_fp8_t, amaxes, row, column,
        m, n, out_m, out_n, has_bf16, has_fp8, has_fp8_t, has_amax, limit,
        block_m, block_n,
    )
    # fmt: on
