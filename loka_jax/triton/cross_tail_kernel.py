"""The kernels of `cross_tail`. Importing this module imports Triton.

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
    store,
    store_sums,
    write,
)


@triton.jit
@no_type_check
def cross_tail_kernel(
    z,
    z_scale,
    z_scale_2,
    x0,
    x0_scale,
    x0_scale_2,
    x,
    bias,
    y_scale_inv,
    y,
    y_fp8,
    y_fp8_t,
    amaxes,
    m: tl.constexpr,
    n: tl.constexpr,
    z_scales: tl.constexpr,
    x0_scales: tl.constexpr,
    has_bias: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes `y = x0 * (z + bias) + x`."""
    row, column = first_of_tile(n, block_m, block_n)
    c = read(z, row, column, m, n, block_m, block_n)
    a = read(x0, row, column, m, n, block_m, block_n)
    b = read(x, row, column, m, n, block_m, block_n)
    c = scaled(c, z_scale, z_scale_2, z_scales)
    if has_bias:
        c += read_vector(bias, column, n, block_n)[None, :]
    tile = scaled(a, x0_scale, x0_scale_2, x0_scales) * c + b
    # fmt: off
    write(
        tile, y_scale_inv, y, y_fp8, y_fp8_t, amaxes, row, column,
        m, n, has_bf16, has_fp8, has_fp8_t, has_amax, limit, block_m, block_n,
    )
    # fmt: on


@triton.jit
@no_type_check
def cross_tail_backward_kernel(
    d,
    d_scale,
    d_scale_2,
    r,
    x0,
    x0_scale,
    x0_scale_2,
    z,
    z_scale,
    z_scale_2,
    bias,
    dx0,
    u_scale_inv,
    u,
    u_fp8,
    u_fp8_t,
    amaxes,
    dx0_out,
    g_out,
    dbias,
    m: tl.constexpr,
    n: tl.constexpr,
    d_scales: tl.constexpr,
    has_r: tl.constexpr,
    has_g: tl.constexpr,
    x0_scales: tl.constexpr,
    z_scales: tl.constexpr,
    has_bias: tl.constexpr,
    has_dx0: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes g, u = g * x0, dx0 + g * (z + bias), and partial sums of dbias."""
    row, column = first_of_tile(n, block_m, block_n)
    g = read(d, row, column, m, n, block_m, block_n)
    g = scaled(g, d_scale, d_scale_2, d_scales)
    if has_r:
        g += read(r, row, column, m, n, block_m, block_n)
    if has_g:
        store(g_out, g, row, column, m, n, block_m, block_n)
    c = read(z, row, column, m, n, block_m, block_n)
    c = scaled(c, z_scale, z_scale_2, z_scales)
    if has_bias:
        c += read_vector(bias, column, n, block_n)[None, :]
    c = g * c
    if has_dx0:
        c += read(dx0, row, column, m, n, block_m, block_n)
    store(dx0_out, c, row, column, m, n, block_m, block_n)
    tile = read(x0, row, column, m, n, block_m, block_n)
    tile = g * scaled(tile, x0_scale, x0_scale_2, x0_scales)
    if has_bias:
        store_sums(dbias, tile, row, column, n, block_m, block_n)
    # fmt: off
    write(
        tile, u_scale_inv, u, u_fp8, u_fp8_t, amaxes, row, column,
        m, n, has_bf16, has_fp8, has_fp8_t, has_amax, limit, block_m, block_n,
    )
    # fmt: on
