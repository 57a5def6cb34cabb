"""The kernels of `joined_norm`. Importing this module imports Triton.

A tile is `of.block_m` embeddings of `of.d` values, rows of the whole. Each row lies in
one of the parts, whose first embeddings are `of.firsts`. Operands are trees, see
`trees`.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def joined_norm_kernel(given, out, of):
    """Writes `y = gamma xhat + beta` with `xhat = norm(parts + x)`, xhat and rstd."""
    row, columns, inside = _tile(tl.program_id(0), of)
    at = _offsets(row, columns, of)
    v = tl.load(given.x.at + at, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(len(given.parts)):
        of_part, is_there = _of_part(given.parts[i], i, row, columns, inside, of)
        v += tl.load(given.parts[i].at + of_part, mask=is_there, other=0.0)
    if of.norm == "layer":
        v = tl.where(columns < of.d, v - (tl.sum(v, axis=1) / of.d)[:, None], 0.0)
    rate = tl.rsqrt(tl.sum(v * v, axis=1) / of.d + of.epsilon)
    v *= rate[:, None]
    if out.rstd is not None:
        tl.store(out.rstd.at + row, rate, mask=row < of.rows)
    if out.xhat is not None:
        tl.store(out.xhat.at + at, v.to(out.xhat.at.dtype.element_ty), mask=inside)
    if given.vectors.gamma is not None:
        v *= _vector(given.vectors.gamma, columns, of)
    if given.vectors.beta is not None:
        v += _vector(given.vectors.beta, columns, of)
    tl.store(out.y.at + at, v.to(out.y.at.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def joined_norm_backward_kernel(given, out, of):
    """Writes the gradient of the sum, to the parts' and to x's, and partial sums.

    Programs take tiles in turn, so that a program has one sum for gamma and beta each.
    """
    gamma = tl.zeros((of.block_m, of.block_n), tl.float32)
    beta = tl.zeros((of.block_m, of.block_n), tl.float32)
    for tile in tl.range(
        tl.program_id(0), of.tiles, tl.num_programs(0), num_stages=of.stages
    ):
        row, columns, inside = _tile(tile, of)
        at = _offsets(row, columns, of)
        g = tl.load(given.dy.at + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(given.xhat.at + at, mask=inside, other=0.0).to(tl.float32)
        rate = tl.load(given.rstd.at + row, mask=row < of.rows, other=0.0)
        gamma += g * v
        beta += g
        if given.gamma is not None:
            g *= _vector(given.gamma, columns, of)
        along = tl.sum(g * v, axis=1) / of.d
        if of.norm == "layer":
            g -= (tl.sum(g, axis=1) / of.d)[:, None]
        g = (g - v * along[:, None]) * rate[:, None]
        g = g.to(given.dy.at.dtype.element_ty)
        if out.dx is not None:
            tl.store(out.dx.at + at, g, mask=inside)
        for i in tl.static_range(len(out.parts)):
            of_part, is_there = _of_part(out.parts[i], i, row, columns, inside, of)
            tl.store(out.parts[i].at + of_part, g, mask=is_there)
    column = tl.arange(0, of.block_n)
    to = tl.program_id(0) * of.d + column
    if out.gamma is not None:
        tl.store(out.gamma.at + to, tl.sum(gamma, axis=0), mask=column < of.d)
    if out.beta is not None:
        tl.store(out.beta.at + to, tl.sum(beta, axis=0), mask=column < of.d)


@triton.jit
@no_type_check
def _tile(tile, of):
    """Returns rows, columns, and which elements lie inside."""
    row = tile * of.block_m + tl.arange(0, of.block_m)
    columns = tl.arange(0, of.block_n)[None, :]
    return row, columns, (row < of.rows)[:, None] & (columns < of.d)


@triton.jit
@no_type_check
def _offsets(row, columns, of):
    # Beyond 2^31 elements they need 64 bits.
    return row.to(tl.int64)[:, None] * of.d + columns


@triton.jit
@no_type_check
def _of_part(part, i: tl.constexpr, row, columns, inside, of):
    """Returns the offsets of a tile in a part, and which elements lie in it."""
    place = row % of.n - of.firsts[i]
    at = _offsets(row // of.n * part.shape[1] + place, columns, of)
    return at, inside & ((place >= 0) & (place < part.shape[1]))[:, None]


@triton.jit
@no_type_check
def _vector(x, columns, of):
    return tl.load(x.at + columns, mask=columns < of.d, other=0.0)
