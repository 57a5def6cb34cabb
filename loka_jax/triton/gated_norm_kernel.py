"""The kernels of `gated_norm`. Importing this module imports Triton.

A tile has `of.block_m` whole rows of `of.n` columns, of an array that may have more.
Operands are trees, see `trees`.
"""

import triton.language as tl

from loka_jax.triton.jit import jit
from loka_jax.triton.norm_tail_kernel import activated, slope
from loka_jax.triton.unbiased_kernel import dropped


@jit
def gated_norm_kernel(given, out, of):
    """Writes `y = drop([a; x; (gamma norm(x) + beta) a])` with `a = silu(u)`."""
    row = tl.program_id(0) * of.block_m + tl.arange(0, of.block_m)
    a = activated(_read(given.u, 0, row, of), "swish")
    x = _read(given.x, 0, row, of)
    xhat, _ = _normed(x, of)
    y = _affine(xhat, given.vectors, of) * a
    _write(out.y, _drop(a, given.dropout, 0, row, of), 0, row, of)
    _write(out.y, _drop(x, given.dropout, 1, row, of), 1, row, of)
    _write(out.y, _drop(y, given.dropout, 2, row, of), 2, row, of)


@jit
def gated_norm_backward_kernel(given, out, of):
    """Writes the gradients of u and x, and partial sums for gamma and beta."""
    gamma = tl.zeros((of.block_m, of.block_n), tl.float32)
    beta = tl.zeros((of.block_m, of.block_n), tl.float32)
    for step in tl.range(
        tl.program_id(0), of.steps, tl.num_programs(0), num_stages=of.stages
    ):
        row = step * of.block_m + tl.arange(0, of.block_m)
        u, x = _read(given.u, 0, row, of), _read(given.x, 0, row, of)
        of_a = _drop(_read(given.dy, 0, row, of), given.dropout, 0, row, of)
        of_x = _drop(_read(given.dy, 1, row, of), given.dropout, 1, row, of)
        of_y = _drop(_read(given.dy, 2, row, of), given.dropout, 2, row, of)
        xhat, rate = _normed(x, of)
        of_a += of_y * _affine(xhat, given.vectors, of)
        _write(out.u, of_a * slope(u, "swish"), 0, row, of)
        g = of_y * activated(u, "swish")
        gamma += g * xhat
        beta += g
        if given.vectors.gamma is not None:
            g *= _vector(given.vectors.gamma, of)
        along = tl.sum(g * xhat, axis=1) / of.n
        g -= (tl.sum(g, axis=1) / of.n)[:, None] + xhat * along[:, None]
        _write(out.x, of_x + g * rate[:, None], 0, row, of)
    column = tl.arange(0, of.block_n)
    to = tl.program_id(0) * of.n + column
    if out.gamma is not None:
        tl.store(out.gamma.at + to, tl.sum(gamma, axis=0), mask=column < of.n)
    if out.beta is not None:
        tl.store(out.beta.at + to, tl.sum(beta, axis=0), mask=column < of.n)


@jit
def _normed(x, of):
    """Returns xhat, zeros past the end of the columns, and rstd."""
    mean = tl.sum(x, axis=1) / of.n
    centred = tl.where(_columns(of) < of.n, x - mean[:, None], 0.0)
    rate = tl.rsqrt(tl.sum(centred * centred, axis=1) / of.n + of.epsilon)
    return centred * rate[:, None], rate


@jit
def _affine(xhat, vectors, of):
    if vectors.gamma is not None:
        xhat *= _vector(vectors.gamma, of)
    if vectors.beta is not None:
        xhat += _vector(vectors.beta, of)
    return xhat


@jit
def _drop(v, dropout, part: tl.constexpr, row, of):
    """Returns a tile of a part of y, or of its gradient, without what is dropped."""
    return dropped(v, dropout, row, _columns(of) + part * of.n)


@jit
def _columns(of):
    return tl.arange(0, of.block_n)[None, :]


@jit
def _place(x, part: tl.constexpr, row, of):
    """Returns pointers to a tile of a part, and which of them lie inside."""
    # Beyond 2^31 elements they need 64 bits.
    start = row.to(tl.int64)[:, None] * x.shape[1] + part * of.n
    inside = (row < of.rows)[:, None] & (_columns(of) < of.n)
    return x.at + start + _columns(of), inside


@jit
def _read(x, part: tl.constexpr, row, of):
    at, inside = _place(x, part, row, of)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@jit
def _write(x, v, part: tl.constexpr, row, of):
    at, inside = _place(x, part, row, of)
    tl.store(at, v.to(x.at.dtype.element_ty), mask=inside)


@jit
def _vector(x, of):
    columns = _columns(of)
    return tl.load(x.at + columns, mask=columns < of.n, other=0.0)
