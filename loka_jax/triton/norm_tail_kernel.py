"""The kernels of norm tails. Importing this module imports Triton.

A tile that holds all columns that share a statistic computes it. Else a kernel before
computes those of whole rows.
"""

import triton.language as tl

from loka_jax.triton.jit import jit
from loka_jax.triton.tail_kernel import (
    cut,
    decode,
    first_of_tile,
    once,
    read,
    read_vector,
    store,
    store_row_sums,
    write,
)
from loka_jax.triton.unbiased_kernel import dropped

_GELU_FACTOR = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_GELU_CUBIC = tl.constexpr(0.044715)
_LOG2_E = tl.constexpr(1.4426950408889634)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0


@jit
def norm_tail_kernel(given, out, of):
    """Writes y, xhat times `of.xhat_scale`, and rstd, in an order of `normed`."""
    row, column = first_of_tile(of)
    v = _biased(given.summands[0], given, row, column, of)
    v = _argument(v, given, row, column, of)
    if given.rate is not None:
        if of.norm == "layer":
            v -= read_vector(given.mean, row, of.m, of.block_m)[:, None]
        v *= read_vector(given.rate, row, of.m, of.block_m)[:, None]
    elif of.norm != "none":
        count = tl.minimum(of.n - column, of.block_n)
        if of.norm == "layer":
            v = cut(v - (tl.sum(v, axis=1) / count)[:, None], row, column, of)
        rate = tl.rsqrt(tl.sum(v * v, axis=1) / count + of.epsilon)
        if out.rstd is not None:
            at = column // of.block_n * of.m
            _store_rows(out.rstd, rate, row, at, of)
        v *= rate[:, None]
    if out.xhat is not None:
        kept = cut(v * of.xhat_scale, row, column, of)
        store(out.xhat, kept, row, column, of.block_m, of.block_n)
    y = _affine(v, given.vectors, column, of)
    if not of.acts_first:
        y = _drop(activated(y, of.activation), given.dropout, row, column, of)
    if of.order == "norm_act_sum":
        y = _plus(y, given.summands, row, column, of)
    if of.order == "norm_act_mul":
        y *= decode(given.summands[1], row, column, of)
    write(y, out.y, given.scale_inv, row, column, of)


@jit
def norm_moments_kernel(given, out, of):
    """Writes the mean of each row of the norm's argument, and rstd."""
    row = _last_rows_first(of)
    total = tl.zeros((of.block_m, of.block_n), tl.float32)
    squares = tl.zeros((of.block_m, of.block_n), tl.float32)
    for column in tl.range(0, of.n, of.block_n, loop_unroll_factor=2):
        v = _biased(given.summands[0], given, row, column, of)
        v = _argument(v, given, row, column, of)
        total += v
        squares += v * v
    mean, moment = tl.sum(total, axis=1) / of.n, tl.sum(squares, axis=1) / of.n
    if of.norm == "layer":
        # Rounding may make it negative; NaN stays NaN.
        moment -= mean * mean
        moment = tl.maximum(moment, 0.0, propagate_nan=tl.PropagateNan.ALL)
    _store_rows(out.mean, mean, row, 0, of)
    _store_rows(out.rate, tl.rsqrt(moment + of.epsilon), row, 0, of)


@jit
def _last_rows_first(of):
    """Returns the first row of a program: the cache holds the rows written last."""
    return (tl.num_programs(0) - 1 - tl.program_id(0)) * of.block_m


@jit
def norm_tail_backward_kernel(given, out, of):
    """Writes the gradient of the product, from the summands of that of y.

    And that of a residual between activation and norm, and partial sums over rows for
    the bias, gamma and beta.
    """
    row, column = first_of_tile(of)
    v = _kept(given, row, column, of)
    g = _gradient(v, given, row, column, of)
    if given.vectors.gamma is not None or given.vectors.beta is not None:
        g = once(g)
    if given.vectors.gamma is not None:
        store_row_sums(out.sums.gamma, g * v, row, column, of)
    if given.vectors.beta is not None:
        store_row_sums(out.sums.beta, g, row, column, of)
    if given.vectors.gamma is not None:
        g *= _vector(given.vectors.gamma, column, of)
    if given.along is not None:
        along = read_vector(given.along, row, of.m, of.block_m)
        if of.norm == "layer":
            g -= read_vector(given.centre, row, of.m, of.block_m)[:, None]
        rate = read_vector(given.rstd, row, of.m, of.block_m)
        g = (g - v * along[:, None]) * rate[:, None]
    elif of.norm != "none":
        count = tl.minimum(of.n - column, of.block_n)
        along = tl.sum(g * v, axis=1) / count
        if of.norm == "layer":
            g -= (tl.sum(g, axis=1) / count)[:, None]
        rows = row + tl.arange(0, of.block_m)
        at = given.rstd.at + column // of.block_n * of.m + rows
        rate = tl.load(at, mask=rows < of.m, other=0.0)
        g = (g - v * along[:, None]) * rate[:, None]
    if out.residual is not None:
        kept = g
        if given.factor is not None:
            kept = _sum(given.gradients, row, column, of)
            kept = _drop(kept, given.dropout, row, column, of)
            kept *= activated(_affine(v, given.vectors, column, of), of.activation)
        kept = cut(kept, row, column, of)
        store(out.residual, kept, row, column, of.block_m, of.block_n)
    if of.acts_first:
        g = _drop(g, given.dropout, row, column, of)
        if given.product is not None:
            z = _biased(given.product, given, row, column, of)
            g *= slope(z, of.activation)
    if given.vectors.bias is not None:
        g = once(g)
        store_row_sums(out.sums.bias, g, row, column, of)
    write(g, out.dz, given.scale_inv, row, column, of)


@jit
def norm_projections_kernel(given, out, of):
    """Writes the means of g and of g xhat over each row, g being gamma du."""
    row = _last_rows_first(of)
    centre = tl.zeros((of.block_m, of.block_n), tl.float32)
    along = tl.zeros((of.block_m, of.block_n), tl.float32)
    for column in tl.range(0, of.n, of.block_n, loop_unroll_factor=2):
        v = _kept(given, row, column, of)
        g = _gradient(v, given, row, column, of)
        if given.vectors.gamma is not None:
            g *= _vector(given.vectors.gamma, column, of)
        centre += g
        along += g * v
    _store_rows(out.centre, tl.sum(centre, axis=1) / of.n, row, 0, of)
    _store_rows(out.along, tl.sum(along, axis=1) / of.n, row, 0, of)


@jit
def _plus(v, summands, row, column, of):
    """Returns a tile and all summands but the first."""
    for i in tl.static_range(1, len(summands)):
        v += decode(summands[i], row, column, of)
    return v


@jit
def _sum(summands, row, column, of):
    return _plus(decode(summands[0], row, column, of), summands, row, column, of)


@jit
def _biased(product, given, row, column, of):
    """Returns a tile of a product and the bias, zeros past the end of the columns."""
    v = decode(product, row, column, of)
    if given.vectors.bias is not None:
        v += _vector(given.vectors.bias, column, of)
    return v


@jit
def _argument(v, given, row, column, of):
    """Returns a tile of the norm's argument, zeros past the end of the columns."""
    if of.acts_first:
        v = _drop(activated(v, of.activation), given.dropout, row, column, of)
        if of.activation == "sigmoid":  # of 0 it is not 0
            v = cut(v, row, column, of)
    if of.order == "sum_norm_act" or of.order == "act_sum_norm":
        v = _plus(v, given.summands, row, column, of)
    return v


@jit
def _drop(y, dropout, row, column, of):
    rows = row + tl.arange(0, of.block_m)
    columns = (column + tl.arange(0, of.block_n))[None, :]
    return dropped(y, dropout, rows, columns)


@jit
def _vector(x, column, of):
    """Returns a tile whose rows are the entries of its columns, zeros past the end.

    Read as a tile: a vector would pass through shared memory, with barriers, to the
    threads that need it.
    """
    rows = tl.zeros((of.block_m, 1), tl.int32)
    columns = rows + (column + tl.arange(0, of.block_n))[None, :]
    return tl.load(x.at + columns, mask=columns < of.n, other=0.0)


@jit
def _affine(v, vectors, column, of):
    """Returns a tile of `gamma v + beta`."""
    if vectors.gamma is not None:
        v *= _vector(vectors.gamma, column, of)
    if vectors.beta is not None:
        v += _vector(vectors.beta, column, of)
    return v


@jit
def _store_rows(x, values, row, start, of):
    """Writes a number of each row of a tile, from `start` on."""
    rows = row + tl.arange(0, of.block_m)
    tl.store(x.at + start + rows, values, mask=rows < of.m)


@jit
def _kept(given, row, column, of):
    """Returns a tile of xhat, or of what stands for it; else zeros."""
    if given.xhat is not None:
        return read(given.xhat, row, column, of) * (1.0 / of.xhat_scale)
    elif given.product is not None and not of.acts_first:
        return _biased(given.product, given, row, column, of)
    else:
        return tl.zeros((of.block_m, of.block_n), tl.float32)


@jit
def _gradient(v, given, row, column, of):
    """Returns the gradient of what gamma and beta make, zeros past the end of rows."""
    g = _sum(given.gradients, row, column, of)
    if not of.acts_first:
        g = _drop(g, given.dropout, row, column, of)
        if given.factor is not None:
            g *= decode(given.factor, row, column, of)
        g *= slope(_affine(v, given.vectors, column, of), of.activation)
    return g


@jit
def sigmoid(v):
    """Returns `1 / (1 + exp(-v))`, 2 ulp off at most, in 4 instructions."""
    return _share(v * -_LOG2_E)


@jit
def _share(t):
    """Returns `1 / (1 + 2^t)` in 3 instructions.

    `tl.sigmoid` takes 14: its exponential and division are right for subnormals, too.
    The tails are bound by instructions.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        ex2.approx.ftz.f32 t, $1;
        add.ftz.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""",
        "=f,f",
        [t],
        tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def _share_of_gelu(v, squared):
    """Returns the factor of v in gelu, by tanh; `squared` is `v * v`."""
    first: tl.constexpr = -_GELU_FACTOR * _LOG2_E
    return _share(v * (squared * (first * _GELU_CUBIC) + first))


@jit
def activated(v, name: tl.constexpr):
    """Returns the activation of v."""
    if name == "relu":
        return tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif name == "swish":
        return v * sigmoid(v)
    elif name == "hard_swish":
        return v * tl.minimum(tl.maximum(v * (1 / 6) + 0.5, 0.0), 1.0)
    elif name == "gelu":
        return v * _share_of_gelu(v, v * v)
    elif name == "exact_gelu":
        return v * (tl.erf(v * _ROOT_HALF) * 0.5 + 0.5)
    elif name == "tanh":
        return sigmoid(v * 2.0) * 2.0 - 1.0
    elif name == "sigmoid":
        return sigmoid(v)
    else:
        return v


@jit
def slope(v, name: tl.constexpr):
    """Returns the derivative of the activation at v."""
    if name == "relu":
        return tl.where(v > 0.0, 1.0, 0.0)
    elif name == "swish":
        s = sigmoid(v)
        return s + v * (s - s * s)
    elif name == "hard_swish":
        gate = tl.minimum(tl.maximum(v * (1 / 6) + 0.5, 0.0), 1.0)
        rest = tl.where(tl.abs(v) < 3.0, 1 / 6, 0.0)
        return gate + v * rest
    elif name == "gelu":
        squared = v * v
        s = _share_of_gelu(v, squared)
        inner = squared * (3 * _GELU_CUBIC * _GELU_FACTOR) + _GELU_FACTOR
        return s + (s - s * s) * (v * inner)
    elif name == "exact_gelu":
        return tl.erf(v * _ROOT_HALF) * 0.5 + 0.5 + v * tl.exp(v * v * -0.5) * _DENSITY
    elif name == "tanh":
        s = sigmoid(v * 2.0)
        return (s - s * s) * 4.0
    elif name == "sigmoid":
        s = sigmoid(v)
        return s - s * s
    else:
        return tl.zeros_like(v) + 1.0
