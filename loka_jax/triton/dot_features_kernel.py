"""The kernels of `dot_features`. Importing this module imports Triton.

A program computes a few examples, one after the other, each as a tile of `tile_n`
vectors by `tile_dim`, zeros past the end: the bottom vector, if there is one, then the
embeddings. An example stays in registers and shared memory between load and store.
"""

import triton.language as tl

from loka_jax.triton.jit import jit


@jit
def dot_features_kernel(given, out, of):
    """Writes the bottom vector, the products of all pairs and zeros, `width` in all.

    `n` counts the vectors, including the bottom one if `has_bottom`.
    """
    lead: tl.constexpr = of.dim if of.has_bottom else 0
    end: tl.constexpr = lead + of.n * (of.n - 1 + 2 * of.has_equal) // 2
    first = tl.program_id(0) * of.examples
    last = tl.minimum(first + of.examples, of.batch) - 1
    v = _load(given, first, of)
    for example in range(first, last + 1):
        # Prefetched while this example is computed, to hide the latency of memory.
        ahead = _load(given, tl.minimum(example + 1, last), of)
        # Beyond 2^31 elements the offsets of examples need 64 bits.
        b = tl.cast(example, tl.int64)
        row = out.at + b * of.width
        pair, is_pair = _pairs(of)
        gram = tl.dot(v, v.T).to(out.at.dtype.element_ty)
        tl.store(row + lead + pair, gram, mask=is_pair)
        if of.has_bottom:
            d = tl.arange(0, of.tile_dim)
            own = tl.load(given.bottom.at + b * of.dim + d, mask=d < of.dim)
            tl.store(row + d, own, mask=d < of.dim)
        if end < of.width:
            rest = end + tl.arange(0, of.tile_rest)
            zeros = tl.zeros((of.tile_rest,), out.at.dtype.element_ty)
            tl.store(row + rest, zeros, mask=rest < of.width)
        v = ahead


@jit
def dot_features_backward_kernel(given, out, of):
    """Writes `S v`, S the symmetric matrix of the pairs' gradients, g added to row 0.

    Row 0 is rounded before the gradient of the bottom vector's own features is added,
    as if these were two operations.
    """
    lead: tl.constexpr = of.dim if of.has_bottom else 0
    first = tl.program_id(0) * of.examples
    for example in range(first, tl.minimum(first + of.examples, of.batch)):
        b = tl.cast(example, tl.int64)
        row = given.g.at + b * of.width
        v = _load(given, example, of)
        pair, is_pair = _pairs(of)
        half = tl.load(row + lead + pair, mask=is_pair, other=0.0)
        # Exact: one of the two summands is zero, or they are equal.
        dv = tl.dot(half + half.T, v).to(v.dtype)
        at, inside = _vectors(out, b, of)
        if of.has_bottom:
            i = tl.arange(0, of.tile_n)[:, None]
            own = inside & (i == 0)
            d = tl.arange(0, of.tile_dim)[None, :]
            dv += tl.load(row + d + tl.zeros_like(i), mask=own, other=0.0)
        tl.store(at, dv, mask=inside)


@jit
def _load(x, example, of):
    """Returns the vectors of an example, zeros past the end."""
    at, inside = _vectors(x, tl.cast(example, tl.int64), of)
    return tl.load(at, mask=inside, other=0.0)


@jit
def _vectors(x, b, of):
    """Returns pointers to the vectors of example `b`, and their mask."""
    i = tl.arange(0, of.tile_n)[:, None]
    d = tl.arange(0, of.tile_dim)[None, :]
    inside = (i < of.n) & (d < of.dim)
    if of.has_bottom:
        others = x.embeddings.at + b * ((of.n - 1) * of.dim) + (i - 1) * of.dim
        start = tl.where(i == 0, x.bottom.at + b * of.dim, others)
        if of.dim % 8 == 0:  # Triton 3.8 would load single values: it sees no alignment
            start = tl.multiple_of(start, (16, 16))
        return start + d, inside
    else:
        return x.embeddings.at + b * (of.n * of.dim) + i * of.dim + d, inside


@jit
def _pairs(of):
    """Returns the index of each pair (i, j) among those of a triangle, and their mask.

    Indices are contiguous along j, so that neighbouring threads access neighbours.
    """
    i = tl.arange(0, of.tile_n)[:, None]
    j = tl.arange(0, of.tile_n)[None, :]
    n: tl.constexpr = of.n
    equal: tl.constexpr = 1 if of.has_equal else 0
    if of.is_upper:
        start = i * (n - 1 + equal) - i * (i - 1) // 2 + equal - 1
        return start + j - i, (j > i - equal) & (j < n)
    else:
        return i * (i - 1 + 2 * equal) // 2 + j, (j < i + equal) & (i < n)
