"""The kernels of `norm_tail`. Importing this module imports Triton.

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
    store_sums,
    write,
)

_GELU_FACTOR = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
@no_type_check
def norm_tail_kernel(
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
    """Writes `y = activation(norm(z + bias + r))`, xhat times `xhat_scale`, and rstd.

    The columns of a tile share a statistic. There is no gamma or beta.
    """
    row, column = first_of_tile(out_n, block_m, block_n)
    v = read(z, row, column, m, z_n, block_m, block_n)
    v = scaled(v, z_scale + z_at, z_scale_2 + z_at_2, z_scales, z_unit)
    if r_n > 0:
        v += read(r, row, column, m, r_n, block_m, block_n)
    if has_bias:
        v += read_vector(bias, column, n, block_n)[None, :]
    if norm != "none":
        count = tl.minimum(n - column, block_n)
        rate = tl.rsqrt(tl.sum(v * v, axis=1) / count + epsilon)
        v *= rate[:, None]
        if has_residuals:
            rows = row + tl.arange(0, block_m)
            at = rstd + column // block_n * m + rows
            tl.store(at, rate, mask=rows < m)
    if has_residuals:
        kept = cut(v * xhat_scale, row, column, m, n, block_m, block_n)
        store(xhat, kept, row, column, out_m, out_n, block_m, block_n)
    tile = activated(v, activation)
    # fmt: off
    write(
        tile, y_scale_inv + y_at, y, y_fp8, y_fp8_t, amaxes, row, column,
        m, n, out_m, out_n, has_bf16, has_fp8, has_fp8_t, has_amax, limit,
        block_m, block_n,
    )
    # fmt: on


@triton.jit
@no_type_check
def norm_tail_backward_kernel(
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

    And partial sums of it over rows, for the bias.
    """
    row, column = first_of_tile(out_n, block_m, block_n)
    g = read(d, row, column, m, d_n, block_m, block_n)
    g = scaled(g, d_scale + d_at, d_scale_2 + d_at_2, d_scales, d_unit)
    if r_n > 0:
        g += read(r, row, column, m, r_n, block_m, block_n)
    v = read(xhat, row, column, m, xhat_n, block_m, block_n) * (1.0 / xhat_scale)
    tile = g * slope(v, activation)
    if norm != "none":
        rows = row + tl.arange(0, block_m)
        rate = tl.load(rstd + column // block_n * m + rows, mask=rows < m, other=0.0)
        count = tl.minimum(n - column, block_n)
        along = tl.sum(tile * v, axis=1) / count
        tile = (tile - v * along[:, None]) * rate[:, None]
    if has_bias:
        store_sums(dbias, tile, row, column, n, block_m, block_n)
    # fmt: off
    write(
        tile, dz_scale_inv + dz_at, dz, dz_fp8, dz_fp8_t, amaxes, row, column,
        m, n, out_m, out_n, has_bf16, has_fp8, has_fp8_t, has_amax, limit,
        block_m, block_n,
    )
    # fmt: on


@triton.jit
@no_type_check
def activated(v, name: tl.constexpr):
    """Returns the activation of v."""
    if name == "relu":
        return tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif name == "swish":
        return v * tl.sigmoid(v)
    elif name == "hard_swish":
        return v * tl.minimum(tl.maximum(v * (1 / 6) + 0.5, 0.0), 1.0)
    elif name == "gelu":
        return v * tl.sigmoid((v + v * v * v * _GELU_CUBIC) * _GELU_FACTOR)
    else:
        return v


@triton.jit
@no_type_check
def slope(v, name: tl.constexpr):
    """Returns the derivative of the activation at v."""
    if name == "relu":
        return tl.where(v > 0.0, 1.0, 0.0)
    elif name == "swish":
        s = tl.sigmoid(v)
        return s + v * (s - s * s)
    elif name == "hard_swish":
        gate = tl.minimum(tl.maximum(v * (1 / 6) + 0.5, 0.0), 1.0)
        rest = tl.where(tl.abs(v) < 3.0, 1 / 6, 0.0)
        return gate + v * rest
    elif name == "gelu":
        s = tl.sigmoid((v + v * v * v * _GELU_CUBIC) * _GELU_FACTOR)
        inner = (v * v * (3 * _GELU_CUBIC) + 1.0) * _GELU_FACTOR
        return s + v * (s - s * s) * inner
    else:
        return tl.zeros_like(v) + 1.0
