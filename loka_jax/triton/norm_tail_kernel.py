"""The kernels of norm tails. Importing this module imports Triton.

A tile that holds all columns that share a statistic is read once. Else all tiles of a
row are read for its statistics first: by a kernel before, or by the program that then
goes over its rows again.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from loka_jax.triton.tail_kernel import (
    columns_of,
    cut,
    decode,
    first_of_tile,
    read,
    read_vector,
    store,
    store_sums,
    write,
)
from loka_jax.triton.unbiased_kernel import uniform

_GELU_FACTOR = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
@no_type_check
def norm_tail_kernel(given, out, of):
    """Writes `y = activation(gamma norm(z + bias) + beta)`, xhat and rstd.

    xhat times `of.xhat_scale`.
    """
    if of.norm == "none":
        row, column = first_of_tile(of)
        _finish(_argument(given, row, column, of), given, out, row, column, of)
    elif of.block_n >= of.features:
        row, column = first_of_tile(of)
        count = tl.minimum(of.n - column, of.block_n)
        v = _argument(given, row, column, of)
        if of.norm == "layer":
            v = cut(v - (tl.sum(v, axis=1) / count)[:, None], row, column, of)
        rate = tl.rsqrt(tl.sum(v * v, axis=1) / count + of.epsilon)
        _store_rate(out, rate, row, column, of)
        _finish(v * rate[:, None], given, out, row, column, of)
    elif given.rate is not None:
        row, column = first_of_tile(of)
        v = _argument(given, row, column, of)
        rate = read_vector(given.rate, row, of.m, of.block_m)
        if of.norm == "layer":
            v -= read_vector(given.mean, row, of.m, of.block_m)[:, None]
        _finish(v * rate[:, None], given, out, row, column, of)
    else:
        row = tl.program_id(0) * of.block_m
        mean, rate = _moments(given, row, of)
        _store_rate(out, rate, row, 0, of)
        for column in range(0, of.out_n, of.block_n):
            v = _argument(given, row, column, of)
            if of.norm == "layer":
                v -= mean[:, None]
            _finish(v * rate[:, None], given, out, row, column, of)


@triton.jit
@no_type_check
def norm_moments_kernel(given, out, of):
    """Writes the mean of each row of the norm's argument, and rstd."""
    row = tl.program_id(0) * of.block_m
    mean, rate = _moments(given, row, of)
    rows = row + tl.arange(0, of.block_m)
    tl.store(out.mean.at + rows, mean, mask=rows < of.m)
    tl.store(out.rate.at + rows, rate, mask=rows < of.m)


@triton.jit
@no_type_check
def _moments(given, row, of):
    """Returns mean and rstd of whole rows."""
    total = tl.zeros((of.block_m,), tl.float32)
    squares = tl.zeros((of.block_m,), tl.float32)
    for column in range(0, of.n, of.block_n):
        v = _argument(given, row, column, of)
        total += tl.sum(v, axis=1)
        squares += tl.sum(v * v, axis=1)
    mean, moment = total / of.n, squares / of.n
    if of.norm == "layer":
        # Rounding may make it negative; NaN stays NaN.
        moment -= mean * mean
        moment = tl.maximum(moment, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return mean, tl.rsqrt(moment + of.epsilon)


@triton.jit
@no_type_check
def norm_tail_backward_kernel(given, out, of):
    """Writes the gradient of the norm's argument, from the summands of that of y.

    And partial sums over rows for the bias, gamma and beta.
    """
    if of.norm == "none" or of.block_n >= of.features:
        first, column = first_of_tile(of)
        dbias = tl.zeros((of.block_n,), tl.float32)
        dgamma = tl.zeros((of.block_n,), tl.float32)
        dbeta = tl.zeros((of.block_n,), tl.float32)
        for i in range(of.repeat):
            row = first * of.repeat + i * of.block_m
            v = _kept(given, row, column, of)
            g = _gradient(v, given, row, column, of)
            if given.vectors.gamma is not None:
                dgamma += tl.sum(g * v, axis=0)
            if given.vectors.beta is not None:
                dbeta += tl.sum(g, axis=0)
            if given.vectors.gamma is not None:
                g *= columns_of(given.vectors.gamma, column, of)
            if of.norm != "none":
                count = tl.minimum(of.n - column, of.block_n)
                along = tl.sum(g * v, axis=1) / count
                if of.norm == "layer":
                    g -= (tl.sum(g, axis=1) / count)[:, None]
                g = (g - v * along[:, None]) * _rate(given, row, column, of)[:, None]
            if given.vectors.bias is not None:
                dbias += tl.sum(g, axis=0)
            write(g, out.dz, given.scale_inv, row, column, of)
        if given.vectors.bias is not None:
            store_sums(out.sums.bias, dbias, first, column, of)
        if given.vectors.gamma is not None:
            store_sums(out.sums.gamma, dgamma, first, column, of)
        if given.vectors.beta is not None:
            store_sums(out.sums.beta, dbeta, first, column, of)
    elif given.along is not None:
        row, column = first_of_tile(of)
        centre = read_vector(given.centre, row, of.m, of.block_m)
        along = read_vector(given.along, row, of.m, of.block_m)
        _of_whole_rows(given, out, centre, along, row, column, of)
    else:
        row = tl.program_id(0) * of.block_m
        centre, along = _projections(given, row, of)
        for column in range(0, of.out_n, of.block_n):
            _of_whole_rows(given, out, centre, along, row, column, of)


@triton.jit
@no_type_check
def norm_projections_kernel(given, out, of):
    """Writes the means of g and of g xhat over each row, g being gamma du."""
    row = tl.program_id(0) * of.block_m
    centre, along = _projections(given, row, of)
    rows = row + tl.arange(0, of.block_m)
    tl.store(out.centre.at + rows, centre, mask=rows < of.m)
    tl.store(out.along.at + rows, along, mask=rows < of.m)


@triton.jit
@no_type_check
def _projections(given, row, of):
    """Returns the means of g and of g xhat over whole rows."""
    centre = tl.zeros((of.block_m,), tl.float32)
    along = tl.zeros((of.block_m,), tl.float32)
    for column in range(0, of.n, of.block_n):
        v = _kept(given, row, column, of)
        g = _gradient(v, given, row, column, of)
        if given.vectors.gamma is not None:
            g *= columns_of(given.vectors.gamma, column, of)
        centre += tl.sum(g, axis=1)
        along += tl.sum(g * v, axis=1)
    return centre / of.n, along / of.n


@triton.jit
@no_type_check
def _of_whole_rows(given, out, centre, along, row, column, of):
    """Writes a tile of the gradient of norms of whole rows, and sums over its rows."""
    v = _kept(given, row, column, of)
    g = _gradient(v, given, row, column, of)
    if given.vectors.gamma is not None:
        store_sums(out.sums.gamma, tl.sum(g * v, axis=0), row, column, of)
    if given.vectors.beta is not None:
        store_sums(out.sums.beta, tl.sum(g, axis=0), row, column, of)
    if given.vectors.gamma is not None:
        g *= columns_of(given.vectors.gamma, column, of)
    if of.norm == "layer":
        g -= centre[:, None]
    g = (g - v * along[:, None]) * _rate(given, row, 0, of)[:, None]
    if given.vectors.bias is not None:
        store_sums(out.sums.bias, tl.sum(g, axis=0), row, column, of)
    write(g, out.dz, given.scale_inv, row, column, of)


@triton.jit
@no_type_check
def _sum(summands, row, column, of):
    total = decode(summands[0], row, column, of)
    for i in tl.static_range(1, len(summands)):
        total += decode(summands[i], row, column, of)
    return total


@triton.jit
@no_type_check
def _argument(given, row, column, of):
    """Returns a tile of the sum and the bias, zeros past the end of the columns."""
    v = _sum(given.summands, row, column, of)
    if given.vectors.bias is not None:
        v += columns_of(given.vectors.bias, column, of)
    return v


@triton.jit
@no_type_check
def _finish(v, given, out, row, column, of):
    """Writes xhat, of which v is a tile, and y."""
    if out.xhat is not None:
        kept = cut(v * of.xhat_scale, row, column, of)
        store(out.xhat, kept, row, column, of.block_m, of.block_n)
    y = activated(_affine(v, given.vectors, column, of), of.activation)
    y = _drop(y, given.dropout, row, column, of)
    write(y, out.y, given.scale_inv, row, column, of)


@triton.jit
@no_type_check
def _drop(y, dropout, row, column, of):
    if dropout is not None:
        rows = row + tl.arange(0, of.block_m)
        columns = (column + tl.arange(0, of.block_n))[None, :]
        u = uniform(dropout.words.at, rows, columns)
        y = tl.where(u < dropout.rate, 0.0, y * (1.0 / (1.0 - dropout.rate)))
    return y


@triton.jit
@no_type_check
def _affine(v, vectors, column, of):
    """Returns a tile of `gamma v + beta`."""
    if vectors.gamma is not None:
        v *= columns_of(vectors.gamma, column, of)
    if vectors.beta is not None:
        v += columns_of(vectors.beta, column, of)
    return v


@triton.jit
@no_type_check
def _store_rate(out, rate, row, column, of):
    if out.rstd is not None:
        rows = row + tl.arange(0, of.block_m)
        at = out.rstd.at + column // of.block_n * of.m + rows
        tl.store(at, rate, mask=rows < of.m)


@triton.jit
@no_type_check
def _rate(given, row, column, of):
    rows = row + tl.arange(0, of.block_m)
    at = given.rstd.at + column // of.block_n * of.m + rows
    return tl.load(at, mask=rows < of.m, other=0.0)


@triton.jit
@no_type_check
def _kept(given, row, column, of):
    """Returns a tile of xhat."""
    return read(given.xhat, row, column, of) * (1.0 / of.xhat_scale)


@triton.jit
@no_type_check
def _gradient(v, given, row, column, of):
    """Returns the gradient of the activation's argument, zeros past the end of rows."""
    g = _sum(given.gradients, row, column, of)
    g = _drop(g, given.dropout, row, column, of)
    return g * slope(_affine(v, given.vectors, column, of), of.activation)


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
