"""The kernels of `cross_matmul`. Importing this module imports Triton.

A program multiplies a tile of block_m rows by block_n columns, both operands K-major as
in `matmul_kernel`, and goes on with it as the kernels of `tail_kernel` do with a tile
that they read. Neighbouring programs share the rows of lhs; all of rhs stays in the L2.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from loka_jax.triton.matmul_kernel import load_operand, operand_pointers
from loka_jax.triton.tail_kernel import (
    first_of_tile,
    load,
    read,
    read_vector,
    scaled,
    store,
    write,
)


@triton.jit
@no_type_check
def cross_matmul_kernel(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
    x0,
    x0_scale,
    x0_scale_2,
    x,
    bias,
    z_scale_inv,
    y_scale_inv,
    z,
    z_fp8,
    z_fp8_t,
    z_amaxes,
    y,
    y_fp8,
    y_fp8_t,
    amaxes,
    m: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    fast_accumulation: tl.constexpr,
    x0_scales: tl.constexpr,
    has_bias: tl.constexpr,
    has_z_bf16: tl.constexpr,
    has_z_fp8: tl.constexpr,
    has_z_fp8_t: tl.constexpr,
    has_z_amax: tl.constexpr,
    z_limit: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Writes `z = lhs rhs^T` and `y = x0 * (z + bias) + x`."""
    row, column = first_of_tile(n, block_m, block_n)
    # In flight while the product is computed.
    a = load(x0, row, column, m, n, block_m, block_n)
    b = load(x, row, column, m, n, block_m, block_n)
    # fmt: off
    tile = _product(
        lhs, rhs, row, column, m, n, k, fast_accumulation, block_m, block_n, block_k
    )
    # fmt: on
    tile = tile * tl.load(lhs_scale) * tl.load(rhs_scale)
    # fmt: off
    write(
        tile, z_scale_inv, z, z_fp8, z_fp8_t, z_amaxes, row, column, m, n,
        has_z_bf16, has_z_fp8, has_z_fp8_t, has_z_amax, z_limit, block_m, block_n,
    )
    if has_bias:
        tile += read_vector(bias, column, n, block_n)[None, :]
    a = scaled(a.to(tl.float32), x0_scale, x0_scale_2, x0_scales)
    tile = a * tile + b.to(tl.float32)
    write(
        tile, y_scale_inv, y, y_fp8, y_fp8_t, amaxes, row, column,
        m, n, has_bf16, has_fp8, has_fp8_t, has_amax, limit, block_m, block_n,
    )
    # fmt: on


@triton.jit
@no_type_check
def cross_matmul_backward_kernel(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
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
    k: tl.constexpr,
    fast_accumulation: tl.constexpr,
    x0_scales: tl.constexpr,
    z_scales: tl.constexpr,
    has_bias: tl.constexpr,
    has_g: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Writes `g = lhs rhs^T + r`, u = g * x0, dx0 + g * (z + bias), sums of dbias."""
    row, column = first_of_tile(n, block_m, block_n)
    # In flight while the product is computed.
    b = load(r, row, column, m, n, block_m, block_n)
    # fmt: off
    g = _product(
        lhs, rhs, row, column, m, n, k, fast_accumulation, block_m, block_n, block_k
    )
    # fmt: on
    g = g * tl.load(lhs_scale) * tl.load(rhs_scale) + b.to(tl.float32)
    if has_g:
        store(g_out, g, row, column, m, n, block_m, block_n)
    c = read(z, row, column, m, n, block_m, block_n)
    c = scaled(c, z_scale, z_scale_2, z_scales)
    if has_bias:
        c += read_vector(bias, column, n, block_n)[None, :]
    c = g * c + read(dx0, row, column, m, n, block_m, block_n)
    store(dx0_out, c, row, column, m, n, block_m, block_n)
    tile = read(x0, row, column, m, n, block_m, block_n)
    tile = g * scaled(tile, x0_scale, x0_scale_2, x0_scales)
    if has_bias:
        columns = column + tl.arange(0, block_n)
        at = dbias + row // block_m * n + columns
        tl.store(at, tl.sum(tile, axis=0), mask=columns < n)
    # fmt: off
    write(
        tile, u_scale_inv, u, u_fp8, u_fp8_t, amaxes, row, column,
        m, n, has_bf16, has_fp8, has_fp8_t, has_amax, limit, block_m, block_n,
    )
    # fmt: on


@triton.jit
@no_type_check
def _product(
    lhs,
    rhs,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    k: tl.constexpr,
    fast_accumulation: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    """Returns a tile of `lhs rhs^T`, summed as in `fp8_matmul_kernel`."""
    lhs_at = operand_pointers(lhs, row, m, k, block_m, block_k)
    rhs_at = operand_pointers(rhs, column, n, k, block_n, block_k)
    total = tl.zeros((block_m, block_n), tl.float32)
    for start in range(0, k, block_k):
        a = load_operand(lhs_at + start, start, k, block_k)
        b = load_operand(rhs_at + start, start, k, block_k)
        if fast_accumulation:
            total = tl.dot(a, b.T, total)
        else:
            total += tl.dot(a, b.T)
    return total
