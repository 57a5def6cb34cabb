"""The kernels of `norm_tail` for norms of whole rows. Importing this imports Triton.

A program computes all tiles of its rows: once for their statistics, and once more for
what it writes.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from loka_jax.triton.norm_tail_kernel import activated, slope
from loka_jax.triton.tail_kernel import (
    cut,
    read,
    read_vector,
    scaled,
    store,
    store_sums,
    write,
)


@triton.jit
@no_type_check
def row_norm_tail_kernel(
    z,
    z_scale,
    z_at,
    z_scale_2,
    z_at_2,
    r,
    bias,
    gamma,
    beta,
    y_scale_inv,
    y_at,
    y,
    y_fp8,
    y_fp8_t,
    amaxes,
    xhat,
    rstd,
    m: tl.constexpr,
    n: tl.constexpr,
    out_m: tl.constexpr,
    out_n: tl.constexpr,
    z_n: tl.constexpr,
    z_scales: tl.constexpr,
    z_unit: tl.constexpr,
    r_n: tl.constexpr,
    has_bias: tl.constexpr,
    has_gamma: tl.constexpr,
    has_beta: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    norm: tl.constexpr,
    has_residuals: tl.constexpr,
    xhat_scale: tl.constexpr,
    activation: tl.constexpr,
    epsilon: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes `y = activation(gamma norm(z + bias + r) + beta)`, xhat and rstd.

    xhat times `xhat_scale`.
    """
    row = tl.program_id(0) * block_m
    total = tl.zeros((block_m,), tl.float32)
    squares = tl.zeros((block_m,), tl.float32)
    # fmt: off
    for column in range(0, n, block_n):
        v = _argument(
            z, z_scale + z_at, z_scale_2 + z_at_2, r, bias, row, column,
            m, n, z_n, z_scales, z_unit, r_n, has_bias, block_m, block_n,
        )
        total += tl.sum(v, axis=1)
        squares += tl.sum(v * v, axis=1)
    # fmt: on
    mean, moment = total / n, squares / n
    if norm == "layer":
        # Rounding may make it negative; NaN stays NaN.
        moment -= mean * mean
        moment = tl.maximum(moment, 0.0, propagate_nan=tl.PropagateNan.ALL)
    rate = tl.rsqrt(moment + epsilon)
    if has_residuals:
        rows = row + tl.arange(0, block_m)
        tl.store(rstd + rows, rate, mask=rows < m)
    # fmt: off
    for column in range(0, out_n, block_n):
        v = _argument(
            z, z_scale + z_at, z_scale_2 + z_at_2, r, bias, row, column,
            m, n, z_n, z_scales, z_unit, r_n, has_bias, block_m, block_n,
        )
        if norm == "layer":
            v -= mean[:, None]
        v *= rate[:, None]
        if has_residuals:
            kept = cut(v * xhat_scale, row, column, m, n, block_m, block_n)
            store(xhat, kept, row, column, out_m, out_n, block_m, block_n)
        u = _affine(v, gamma, beta, column, n, has_gamma, has_beta, block_n)
        write(
            activated(u, activation), y_scale_inv + y_at, y, y_fp8, y_fp8_t, amaxes,
            row, column, m, n, out_m, out_n, has_bf16, has_fp8, has_fp8_t, has_amax,
            limit, block_m, block_n,
        )
    # fmt: on


@triton.jit
@no_type_check
def row_norm_tail_backward_kernel(
    d,
    d_scale,
    d_at,
    d_scale_2,
    d_at_2,
    r,
    xhat,
    rstd,
    bias,
    gamma,
    beta,
    dz_scale_inv,
    dz_at,
    dz,
    dz_fp8,
    dz_fp8_t,
    amaxes,
    dbias,
    dgamma,
    dbeta,
    m: tl.constexpr,
    n: tl.constexpr,
    out_m: tl.constexpr,
    out_n: tl.constexpr,
    d_n: tl.constexpr,
    d_scales: tl.constexpr,
    d_unit: tl.constexpr,
    r_n: tl.constexpr,
    xhat_n: tl.constexpr,
    has_bias: tl.constexpr,
    has_gamma: tl.constexpr,
    has_beta: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    norm: tl.constexpr,
    xhat_scale: tl.constexpr,
    activation: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes the gradient of the norm's argument, where `d + r` is that of y.

    And partial sums over rows for the bias, gamma and beta.
    """
    row = tl.program_id(0) * block_m
    rows = row + tl.arange(0, block_m)
    rate = tl.load(rstd + rows, mask=rows < m, other=0.0)
    centre = tl.zeros((block_m,), tl.float32)
    along = tl.zeros((block_m,), tl.float32)
    # fmt: off
    for column in range(0, n, block_n):
        v = read(xhat, row, column, m, xhat_n, block_m, block_n) * (1.0 / xhat_scale)
        g = _gradient(
            v, d, d_scale + d_at, d_scale_2 + d_at_2, r, gamma, beta, row, column,
            m, n, d_n, d_scales, d_unit, r_n, has_gamma, has_beta, activation,
            block_m, block_n,
        )
        if has_gamma:
            g *= read_vector(gamma, column, n, block_n)[None, :]
        centre += tl.sum(g, axis=1)
        along += tl.sum(g * v, axis=1)
    for column in range(0, out_n, block_n):
        v = read(xhat, row, column, m, xhat_n, block_m, block_n) * (1.0 / xhat_scale)
        g = _gradient(
            v, d, d_scale + d_at, d_scale_2 + d_at_2, r, gamma, beta, row, column,
            m, n, d_n, d_scales, d_unit, r_n, has_gamma, has_beta, activation,
            block_m, block_n,
        )
        if has_gamma:
            store_sums(dgamma, g * v, row, column, n, block_m, block_n)
        if has_beta:
            store_sums(dbeta, g, row, column, n, block_m, block_n)
        if has_gamma:
            g *= read_vector(gamma, column, n, block_n)[None, :]
        if norm == "layer":
            g -= (centre / n)[:, None]
        tile = (g - v * (along / n)[:, None]) * rate[:, None]
        if has_bias:
            store_sums(dbias, tile, row, column, n, block_m, block_n)
        write(
            tile, dz_scale_inv + dz_at, dz, dz_fp8, dz_fp8_t, amaxes, row, column,
            m, n, out_m, out_n, has_bf16, has_fp8, has_fp8_t, has_amax,
            limit, block_m, block_n,
        )
    # fmt: on


@triton.jit
@no_type_check
def _argument(
    z,
    z_scale,
    z_scale_2,
    r,
    bias,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    z_n: tl.constexpr,
    z_scales: tl.constexpr,
    z_unit: tl.constexpr,
    r_n: tl.constexpr,
    has_bias: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns a tile of `z + bias + r`, zeros past the end of the rows."""
    v = read(z, row, column, m, z_n, block_m, block_n)
    v = scaled(v, z_scale, z_scale_2, z_scales, z_unit)
    if r_n > 0:
        v += read(r, row, column, m, r_n, block_m, block_n)
    if has_bias:
        v += read_vector(bias, column, n, block_n)[None, :]
    return v


@triton.jit
@no_type_check
def _affine(
    v,
    gamma,
    beta,
    column,
    n: tl.constexpr,
    has_gamma: tl.constexpr,
    has_beta: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns a tile of `gamma v + beta`."""
    if has_gamma:
        v *= read_vector(gamma, column, n, block_n)[None, :]
    if has_beta:
        v += read_vector(beta, column, n, block_n)[None, :]
    return v


@triton.jit
@no_type_check
def _gradient(
    v,
    d,
    d_scale,
    d_scale_2,
    r,
    gamma,
    beta,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    d_n: tl.constexpr,
    d_scales: tl.constexpr,
    d_unit: tl.constexpr,
    r_n: tl.constexpr,
    has_gamma: tl.constexpr,
    has_beta: tl.constexpr,
    activation: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns the gradient of the activation's argument, zeros past the end of rows."""
    g = read(d, row, column, m, d_n, block_m, block_n)
    g = scaled(g, d_scale, d_scale_2, d_scales, d_unit)
    if r_n > 0:
        g += read(r, row, column, m, r_n, block_m, block_n)
    u = _affine(v, gamma, beta, column, n, has_gamma, has_beta, block_n)
    return g * slope(u, activation)
