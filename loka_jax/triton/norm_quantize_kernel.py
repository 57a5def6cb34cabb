"""The kernel of `norm_quantize`. Importing this module imports Triton.

A program takes `block_rows` whole rows, as a tile (rows, blocks, width) of which the
columns of a block share a statistic. What lies past the end is read as zeros, which
stay zeros up to the output and so touch no sum and no maximum.

`no_type_check` keeps the run-time type checks of the tests off functions that are
source text for Triton's compiler rather than Python.
"""

# Triton is an optional extra; where it is missing pyright takes this package for it.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # bits of a float32 but for its sign
_EXPONENT = tl.constexpr(0x7F800000)  # and those of its power of two; also infinity
_GELU_LINEAR = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
@no_type_check
def norm_quantize_kernel(
    z,
    bias,
    gamma,
    beta,
    y_scale_inv,
    y,
    y_fp8,
    row_scale_inv,
    m: tl.constexpr,
    n: tl.constexpr,
    num_blocks: tl.constexpr,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    norm: tl.constexpr,
    activation: tl.constexpr,
    epsilon: tl.constexpr,
    has_bias: tl.constexpr,
    has_gamma: tl.constexpr,
    has_beta: tl.constexpr,
    writes_y: tl.constexpr,
    writes_fp8: tl.constexpr,
    fp8_max: tl.constexpr,
    least_amax: tl.constexpr,
):
    """Writes `y`, and `y_fp8` with a scale a row or the given one ("tensorwise").

    Of a parameter that it does not have, and of a result that it does not write, the
    kernel does not touch the pointer.
    """
    rows = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    blocks = tl.arange(0, num_blocks)[:, None]
    columns = blocks * width + tl.arange(0, width)[None, :]
    inside = columns < n
    at = rows[:, None, None].to(tl.int64) * n + columns[None, :, :]
    stored = (rows < m)[:, None, None] & inside[None, :, :]

    v = tl.load(z + at, mask=stored, other=0.0).to(tl.float32)
    if has_bias:
        v += _parameter(bias, columns, inside)
    v = _normalized(v, inside, n, width, norm, epsilon)
    if has_gamma:
        v *= _parameter(gamma, columns, inside)
    if has_beta:
        v += _parameter(beta, columns, inside)
    v = _activated(v, activation)

    if writes_y:
        tl.store(y + at, v.to(y.dtype.element_ty), mask=stored)
    if writes_fp8 == "rowwise":
        scale_inv, scale = _row_scale(v, fp8_max, least_amax)
        tl.store(row_scale_inv + rows, scale_inv, mask=rows < m)
        v = _saturated(v * scale[:, None, None], fp8_max)
        tl.store(y_fp8 + at, v.to(y_fp8.dtype.element_ty), mask=stored)
    elif writes_fp8 == "tensorwise":
        one = tl.full((1, 1, 1), 1.0, tl.float32)
        v = _saturated(v * tl.div_rn(one, tl.load(y_scale_inv)), fp8_max)
        tl.store(y_fp8 + at, v.to(y_fp8.dtype.element_ty), mask=stored)


@triton.jit
@no_type_check
def _parameter(pointer, columns, inside):
    """Returns a parameter of the columns, the same for all rows."""
    return tl.load(pointer + columns, mask=inside, other=0.0)[None, :, :]


@triton.jit
@no_type_check
def _normalized(
    v,
    inside,
    n: tl.constexpr,
    width: tl.constexpr,
    norm: tl.constexpr,
    epsilon: tl.constexpr,
):
    """Returns normalized rows; the variance is of the differences from the mean."""
    if norm == "none":
        return v
    else:
        # The last block may be short, and blocks past the end are empty.
        count = tl.sum(inside.to(tl.float32), axis=1)
        count = tl.where(count > 0.0, count, 1.0)[None, :]
        if norm == "layer":
            mean = tl.sum(v, axis=2) / count
            v = tl.where(inside[None, :, :], v - mean[:, :, None], 0.0)
        moment = tl.sum(v * v, axis=2) / count
        return v * tl.rsqrt(moment + epsilon)[:, :, None]


@triton.jit
@no_type_check
def _activated(v, name: tl.constexpr):
    """Returns the activation of v."""
    if name == "relu":
        # A comparison, not a maximum, which would lose a NaN.
        return tl.where(v < 0.0, 0.0, v)
    elif name == "swish":
        return v * tl.sigmoid(v)
    elif name == "hard_swish":
        gate = v * (1.0 / 6.0) + 0.5
        gate = tl.where(gate < 0.0, 0.0, gate)
        return v * tl.where(gate > 1.0, 1.0, gate)
    elif name == "gelu":
        # (1 + tanh(t)) / 2 is the sigmoid of 2 t.
        return v * tl.sigmoid(2.0 * _GELU_LINEAR * (v + _GELU_CUBIC * v * v * v))
    else:
        return v


@triton.jit
@no_type_check
def _row_scale(v, fp8_max: tl.constexpr, least_amax: tl.constexpr):
    """Returns `scale_inv` and `scale` of rows, powers of two; NaN for faulty rows.

    As `fp8.compute_scale_inv`, and of the bits, as there: those of a NaN are above
    infinity's, where a maximum of floats could lose it.
    """
    bits = v.to(tl.int32, bitcast=True) & _MAGNITUDE
    bits = tl.max(tl.max(bits, axis=2), axis=1)
    amax = bits.to(tl.float32, bitcast=True)
    amax = tl.where(amax > least_amax, amax, least_amax)
    # Divided exactly: a quotient a little below a power of two would lose a bit.
    scale = tl.div_rn(tl.full(amax.shape, fp8_max, tl.float32), amax)
    scale = (scale.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    scale = tl.where(bits < _EXPONENT, scale, float("nan"))
    return tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale), scale


@triton.jit
@no_type_check
def _saturated(v, limit: tl.constexpr):
    """Returns v, what is out of range at the limit; a NaN stays."""
    v = tl.where(v > limit, limit, v)
    return tl.where(v < -limit, -limit, v)
