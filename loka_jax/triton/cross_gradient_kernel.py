"""The kernel of `cross_gradient`. Importing this module imports Triton.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from loka_jax.triton.tail_kernel import (
    first_of_tile,
    read,
    read_vector,
    scaled,
    store_part,
    store_sums,
)


@triton.jit
@no_type_check
def cross_gradient_kernel(
    d_0,
    d_0_scale,
    d_0_at,
    d_0_scale_2,
    d_0_at_2,
    d_1,
    d_1_scale,
    d_1_at,
    d_1_scale_2,
    d_1_at_2,
    d_2,
    d_2_scale,
    d_2_at,
    d_2_scale_2,
    d_2_at_2,
    d_3,
    d_3_scale,
    d_3_at,
    d_3_scale_2,
    d_3_at_2,
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
    r,
    r_scale,
    r_at,
    r_scale_2,
    r_at_2,
    outer_column,
    outer_row,
    x0,
    x0_scale,
    x0_at,
    x0_scale_2,
    x0_at_2,
    biases,
    dhead,
    dfirst,
    dsecond,
    m: tl.constexpr,
    n: tl.constexpr,
    out_m: tl.constexpr,
    out_n: tl.constexpr,
    d_0_n: tl.constexpr,
    d_0_scales: tl.constexpr,
    d_0_unit: tl.constexpr,
    d_1_n: tl.constexpr,
    d_1_scales: tl.constexpr,
    d_1_unit: tl.constexpr,
    d_2_n: tl.constexpr,
    d_2_scales: tl.constexpr,
    d_2_unit: tl.constexpr,
    d_3_n: tl.constexpr,
    d_3_scales: tl.constexpr,
    d_3_unit: tl.constexpr,
    z_0_n: tl.constexpr,
    z_0_scales: tl.constexpr,
    z_0_unit: tl.constexpr,
    z_1_n: tl.constexpr,
    z_1_scales: tl.constexpr,
    z_1_unit: tl.constexpr,
    z_2_n: tl.constexpr,
    z_2_scales: tl.constexpr,
    z_2_unit: tl.constexpr,
    r_n: tl.constexpr,
    r_scales: tl.constexpr,
    r_unit: tl.constexpr,
    has_outer: tl.constexpr,
    x0_n: tl.constexpr,
    x0_scales: tl.constexpr,
    x0_unit: tl.constexpr,
    start: tl.constexpr,
    end: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes `d_0 + r + sum over l of d_l * s_l`, `s_l = 1 + z_0 + .. + z_(l-1)`.

    Each z with its bias. The last d may be an outer product, of which the gradient of
    the row is written, too, as partial sums of x0 * s. Columns up to `start` go to the
    first array, those up to `end` to the second.
    """
    row, column = first_of_tile(out_n, block_m, block_n)
    c = read(d_0, row, column, m, d_0_n, block_m, block_n)
    c = scaled(c, d_0_scale + d_0_at, d_0_scale_2 + d_0_at_2, d_0_scales, d_0_unit)
    if r_scales >= 0:
        d = read(r, row, column, m, r_n, block_m, block_n)
        c += scaled(d, r_scale + r_at, r_scale_2 + r_at_2, r_scales, r_unit)
    s = read(z_0, row, column, m, z_0_n, block_m, block_n)
    s = scaled(s, z_0_scale + z_0_at, z_0_scale_2 + z_0_at_2, z_0_scales, z_0_unit)
    s += 1.0 + read_vector(biases, column, n, block_n)[None, :]
    if d_1_scales >= 0:
        d = read(d_1, row, column, m, d_1_n, block_m, block_n)
        c += s * scaled(
            d, d_1_scale + d_1_at, d_1_scale_2 + d_1_at_2, d_1_scales, d_1_unit
        )
    if z_1_scales >= 0:
        z = read(z_1, row, column, m, z_1_n, block_m, block_n)
        s += scaled(z, z_1_scale + z_1_at, z_1_scale_2 + z_1_at_2, z_1_scales, z_1_unit)
        s += read_vector(biases + n, column, n, block_n)[None, :]
    if d_2_scales >= 0:
        d = read(d_2, row, column, m, d_2_n, block_m, block_n)
        c += s * scaled(
            d, d_2_scale + d_2_at, d_2_scale_2 + d_2_at_2, d_2_scales, d_2_unit
        )
    if z_2_scales >= 0:
        z = read(z_2, row, column, m, z_2_n, block_m, block_n)
        s += scaled(z, z_2_scale + z_2_at, z_2_scale_2 + z_2_at_2, z_2_scales, z_2_unit)
        s += read_vector(biases + 2 * n, column, n, block_n)[None, :]
    if d_3_scales >= 0:
        d = read(d_3, row, column, m, d_3_n, block_m, block_n)
        c += s * scaled(
            d, d_3_scale + d_3_at, d_3_scale_2 + d_3_at_2, d_3_scales, d_3_unit
        )
    if has_outer:
        e = read_vector(outer_column, row, m, block_m)[:, None]
        x = read(x0, row, column, m, x0_n, block_m, block_n)
        x = scaled(x, x0_scale + x0_at, x0_scale_2 + x0_at_2, x0_scales, x0_unit)
        store_sums(dhead, e * x * s, row, column, n, block_m, block_n)
        c += e * s * read_vector(outer_row, column, n, block_n)[None, :]
    if start > 0:
        if column < start:  # most tiles have columns of one part alone
            store_part(dfirst, c, row, column, m, 0, start, block_m, block_n)
    if column + block_n > start:
        store_part(dsecond, c, row, column, m, start, end, block_m, block_n)
