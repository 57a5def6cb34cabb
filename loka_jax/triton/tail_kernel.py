"""The kernels of `cross_tail` and `norm_tail`. Importing this module imports Triton.

A program computes a tile of block_m rows by block_n columns. What lies past the end of
the matrices is read as zeros and not written.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 but its sign
_GELU_FACTOR = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.044715)


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
def norm_tail_kernel(
    z,
    z_scale,
    z_scale_2,
    r,
    bias,
    y_scale_inv,
    y,
    y_fp8,
    y_fp8_t,
    amaxes,
    xhat,
    rstd,
    m: tl.constexpr,
    n: tl.constexpr,
    z_scales: tl.constexpr,
    has_r: tl.constexpr,
    has_bias: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    is_norm: tl.constexpr,
    has_residuals: tl.constexpr,
    xhat_scale: tl.constexpr,
    activation: tl.constexpr,
    epsilon: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes `y = activation(norm(z + bias + r))`, xhat times `xhat_scale`, and rstd.

    The columns of a tile share a statistic.
    """
    row, column = first_of_tile(n, block_m, block_n)
    v = read(z, row, column, m, n, block_m, block_n)
    v = scaled(v, z_scale, z_scale_2, z_scales)
    if has_r:
        v += read(r, row, column, m, n, block_m, block_n)
    if has_bias:
        v += read_vector(bias, column, n, block_n)[None, :]
    if is_norm:
        count = tl.minimum(n - column, block_n)
        rate = tl.rsqrt(tl.sum(v * v, axis=1) / count + epsilon)
        v *= rate[:, None]
        if has_residuals:
            rows = row + tl.arange(0, block_m)
            at = rstd + column // block_n * m + rows
            tl.store(at, rate, mask=rows < m)
    if has_residuals:
        kept = v * xhat_scale
        store(xhat, kept, row, column, m, n, block_m, block_n)
    tile = _activated(v, activation)
    # fmt: off
    write(
        tile, y_scale_inv, y, y_fp8, y_fp8_t, amaxes, row, column,
        m, n, has_bf16, has_fp8, has_fp8_t, has_amax, limit, block_m, block_n,
    )
    # fmt: on


@triton.jit
@no_type_check
def norm_tail_backward_kernel(
    d,
    d_scale,
    d_scale_2,
    r,
    xhat,
    rstd,
    dz_scale_inv,
    dz,
    dz_fp8,
    dz_fp8_t,
    amaxes,
    m: tl.constexpr,
    n: tl.constexpr,
    d_scales: tl.constexpr,
    has_r: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    is_norm: tl.constexpr,
    xhat_scale: tl.constexpr,
    activation: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes the gradient of the norm's argument, where `d + r` is that of y."""
    row, column = first_of_tile(n, block_m, block_n)
    g = read(d, row, column, m, n, block_m, block_n)
    g = scaled(g, d_scale, d_scale_2, d_scales)
    if has_r:
        g += read(r, row, column, m, n, block_m, block_n)
    v = read(xhat, row, column, m, n, block_m, block_n) * (1.0 / xhat_scale)
    tile = g * _slope(v, activation)
    if is_norm:
        rows = row + tl.arange(0, block_m)
        rate = tl.load(rstd + column // block_n * m + rows, mask=rows < m, other=0.0)
        count = tl.minimum(n - column, block_n)
        along = tl.sum(tile * v, axis=1) / count
        tile = (tile - v * along[:, None]) * rate[:, None]
    # fmt: off
    write(
        tile, dz_scale_inv, dz, dz_fp8, dz_fp8_t, amaxes, row, column,
        m, n, has_bf16, has_fp8, has_fp8_t, has_amax, limit, block_m, block_n,
    )
    # fmt: on


@triton.jit
@no_type_check
def first_of_tile(n: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr):
    """Returns the first row and column of this program's tile."""
    tiles_n: tl.constexpr = (n + block_n - 1) // block_n
    program = tl.program_id(0)
    return program // tiles_n * block_m, program % tiles_n * block_n


@triton.jit
@no_type_check
def _place(
    matrix,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns pointers to a tile of an (m, n) matrix, and what lies inside of it."""
    rows = (row + tl.arange(0, block_m))[:, None]
    columns = (column + tl.arange(0, block_n))[None, :]
    # Beyond 2^31 elements the offsets of rows need 64 bits.
    return matrix + rows.to(tl.int64) * n + columns, (rows < m) & (columns < n)


@triton.jit
@no_type_check
def read(
    matrix,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns a tile in float32, zeros past the end of the matrix."""
    return load(matrix, row, column, m, n, block_m, block_n).to(tl.float32)


@triton.jit
@no_type_check
def load(
    matrix,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns a tile in the dtype of the matrix, zeros past its end."""
    at, inside = _place(matrix, row, column, m, n, block_m, block_n)
    if m % block_m == 0 and n % block_n == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
@no_type_check
def read_vector(vector, column, n: tl.constexpr, block_n: tl.constexpr):
    """Returns the entries of a tile's columns, zeros past the end."""
    columns = column + tl.arange(0, block_n)
    return tl.load(vector + columns, mask=columns < n, other=0.0)


@triton.jit
@no_type_check
def scaled(tile, first, second, count: tl.constexpr):
    """Returns a tile times its scales, not times their product, which may vanish."""
    if count > 0:
        tile *= tl.load(first)
    if count > 1:
        tile *= tl.load(second)
    return tile


@triton.jit
@no_type_check
def store(
    matrix,
    tile,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes a tile in the dtype of the matrix."""
    at, inside = _place(matrix, row, column, m, n, block_m, block_n)
    tile = tile.to(matrix.dtype.element_ty)
    if m % block_m == 0 and n % block_n == 0:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=inside)


@triton.jit
@no_type_check
def write(
    tile,
    scale_inv,
    out,
    out_fp8,
    out_fp8_t,
    amaxes,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes a tile of a result in every form, and the tile's amax."""
    if has_bf16:
        store(out, tile, row, column, m, n, block_m, block_n)
    if has_fp8:
        cast = tile * (1.0 / tl.load(scale_inv))
        # NaN stays NaN.
        cast = tl.clamp(cast, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        cast = cast.to(out_fp8.dtype.element_ty)
        store(out_fp8, cast, row, column, m, n, block_m, block_n)
        if has_fp8_t:
            store(out_fp8_t, tl.trans(cast), column, row, n, m, block_n, block_m)
    if has_amax:
        _store_amax(amaxes, tile, row, column, m, n, block_m, block_n)


@triton.jit
@no_type_check
def _store_amax(
    amaxes,
    tile,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes the largest magnitude of this program's tile.

    Of integers, in whose order a NaN lies above infinity: a maximum of floats drops it.
    """
    bits = tile.to(tl.int32, bitcast=True) & _MAGNITUDE
    if m % block_m != 0 or n % block_n != 0:
        rows = (row + tl.arange(0, block_m))[:, None]
        columns = (column + tl.arange(0, block_n))[None, :]
        bits = tl.where((rows < m) & (columns < n), bits, 0)
    largest = tl.max(tl.max(bits, axis=1), axis=0)
    tl.store(amaxes + tl.program_id(0), largest.to(tl.float32, bitcast=True))


@triton.jit
@no_type_check
def _activated(v, name: tl.constexpr):
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
def _slope(v, name: tl.constexpr):
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
