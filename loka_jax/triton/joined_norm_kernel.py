"""The kernels of `joined_norm`. Importing this module imports Triton.

A program has `of.block_m` embeddings of `of.d` values, rows of the whole, in tiles of
`of.widths` columns: what one power of two would load past d is time lost. Each row lies
in one of the parts, whose first embeddings are `of.firsts`. Operands are trees, see
`trees`.
"""

import triton.language as tl

from loka_jax.triton.jit import jit


@jit
def joined_norm_kernel(given, out, of):
    """Writes `y = gamma xhat + beta` with `xhat = norm(parts + x)`, xhat and rstd."""
    row = tl.program_id(0) * of.block_m + tl.arange(0, of.block_m)
    tiles, total = (), tl.zeros((of.block_m,), tl.float32)
    for j in tl.static_range(len(of.widths)):
        columns, inside = _columns(j, row, of)
        at = _offsets(row, columns, of)
        v = tl.load(given.x.at + at, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(len(given.parts)):
            of_part, is_there = _of_part(given.parts[i], i, row, columns, inside, of)
            v += tl.load(given.parts[i].at + of_part, mask=is_there, other=0.0)
        tiles = tiles + (v,)
        total += tl.sum(v, axis=1)
    mean = 0.0
    if of.norm == "layer":
        mean = (total / of.d)[:, None]
    squares = tl.zeros((of.block_m,), tl.float32)
    for j in tl.static_range(len(of.widths)):
        columns, inside = _columns(j, row, of)
        centred = tl.where(columns < of.d, tiles[j] - mean, 0.0)
        squares += tl.sum(centred * centred, axis=1)
    rate = tl.rsqrt(squares / of.d + of.epsilon)
    if out.rstd is not None:
        tl.store(out.rstd.at + row, rate, mask=row < of.rows)
    for j in tl.static_range(len(of.widths)):
        columns, inside = _columns(j, row, of)
        at = _offsets(row, columns, of)
        v = (tiles[j] - mean) * rate[:, None]
        if out.xhat is not None:
            tl.store(out.xhat.at + at, v.to(out.xhat.at.dtype.element_ty), mask=inside)
        if given.vectors.gamma is not None:
            v *= _vector(given.vectors.gamma, columns, of)
        if given.vectors.beta is not None:
            v += _vector(given.vectors.beta, columns, of)
        tl.store(out.y.at + at, v.to(out.y.at.dtype.element_ty), mask=inside)


@jit
def joined_norm_backward_kernel(given, out, of):
    """Writes the gradient of the sum, to the parts' and to x's, and partial sums.

    Programs take rows in turn, so that a program has one sum for gamma and beta each.
    """
    gammas, betas = (), ()
    for j in tl.static_range(len(of.widths)):
        gammas = gammas + (tl.zeros((of.block_m, of.widths[j]), tl.float32),)
        betas = betas + (tl.zeros((of.block_m, of.widths[j]), tl.float32),)
    for step in tl.range(
        tl.program_id(0), of.steps, tl.num_programs(0), num_stages=of.stages
    ):
        row = step * of.block_m + tl.arange(0, of.block_m)
        rate = tl.load(given.rstd.at + row, mask=row < of.rows, other=0.0)
        tiles, old_gammas, old_betas = (), gammas, betas
        gammas, betas = (), ()
        along = tl.zeros((of.block_m,), tl.float32)
        total = tl.zeros((of.block_m,), tl.float32)
        for j in tl.static_range(len(of.widths)):
            columns, inside = _columns(j, row, of)
            at = _offsets(row, columns, of)
            g = tl.load(given.dy.at + at, mask=inside, other=0.0).to(tl.float32)
            v = tl.load(given.xhat.at + at, mask=inside, other=0.0).to(tl.float32)
            gammas = gammas + (old_gammas[j] + g * v,)
            betas = betas + (old_betas[j] + g,)
            if given.gamma is not None:
                g *= _vector(given.gamma, columns, of)
            along += tl.sum(g * v, axis=1)
            total += tl.sum(g, axis=1)
            tiles = tiles + ((g, v),)
        mean = 0.0
        if of.norm == "layer":
            mean = (total / of.d)[:, None]
        for j in tl.static_range(len(of.widths)):
            columns, inside = _columns(j, row, of)
            at = _offsets(row, columns, of)
            g = tiles[j][0] - mean - tiles[j][1] * (along / of.d)[:, None]
            g = (g * rate[:, None]).to(given.dy.at.dtype.element_ty)
            if out.dx is not None:
                tl.store(out.dx.at + at, g, mask=inside)
            for i in tl.static_range(len(out.parts)):
                of_part, is_there = _of_part(out.parts[i], i, row, columns, inside, of)
                tl.store(out.parts[i].at + of_part, g, mask=is_there)
    for j in tl.static_range(len(of.widths)):
        column = of.starts[j] + tl.arange(0, of.widths[j])
        to = tl.program_id(0) * of.d + column
        if out.gamma is not None:
            tl.store(out.gamma.at + to, tl.sum(gammas[j], axis=0), mask=column < of.d)
        if out.beta is not None:
            tl.store(out.beta.at + to, tl.sum(betas[j], axis=0), mask=column < of.d)


@jit
def _columns(j: tl.constexpr, row, of):
    """Returns the columns of a tile, and which of its elements lie inside."""
    columns = of.starts[j] + tl.arange(0, of.widths[j])[None, :]
    return columns, (row < of.rows)[:, None] & (columns < of.d)


@jit
def _offsets(row, columns, of):
    # Beyond 2^31 elements they need 64 bits.
    return row.to(tl.int64)[:, None] * of.d + columns


@jit
def _of_part(part, i: tl.constexpr, row, columns, inside, of):
    """Returns the offsets of a tile in a part, and which elements lie in it."""
    place = row % of.n - of.firsts[i]
    at = _offsets(row // of.n * part.shape[1] + place, columns, of)
    return at, inside & ((place >= 0) & (place < part.shape[1]))[:, None]


@jit
def _vector(x, columns, of):
    return tl.load(x.at + columns, mask=columns < of.d, other=0.0)
