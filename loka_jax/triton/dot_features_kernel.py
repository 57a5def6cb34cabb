"""The kernels of `dot_features`. Importing this module imports Triton.

A program computes a few examples, one after the other, each as a tile of `tile_n`
vectors by `tile_dim`, zeros past the end: the bottom vector, if there is one, then the
embeddings. An example stays in registers and shared memory between load and store.

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
def dot_features_kernel(
    bottom,
    embeddings,
    out,
    batch: tl.constexpr,
    n: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    has_bottom: tl.constexpr,
    is_upper: tl.constexpr,
    has_equal: tl.constexpr,
    examples: tl.constexpr,
    tile_n: tl.constexpr,
    tile_dim: tl.constexpr,
    tile_rest: tl.constexpr,
):
    """Writes the bottom vector, the products of all pairs and zeros, `width` in all.

    `n` counts the vectors, including the bottom one if `has_bottom`; else its pointer
    is not touched.
    """
    lead: tl.constexpr = dim if has_bottom else 0
    end: tl.constexpr = lead + n * (n - 1 + 2 * has_equal) // 2
    first = tl.program_id(0) * examples
    last = tl.minimum(first + examples, batch) - 1
    v = _load(bottom, embeddings, first, n, dim, has_bottom, tile_n, tile_dim)
    for example in range(first, last + 1):
        # Prefetched while this example is computed, to hide the latency of memory.
        following = tl.minimum(example + 1, last)
        ahead = _load(
            bottom, embeddings, following, n, dim, has_bottom, tile_n, tile_dim
        )
        # Beyond 2^31 elements the offsets of examples need 64 bits.
        b = tl.cast(example, tl.int64)
        row = out + b * width
        pair, is_pair = _pairs(n, is_upper, has_equal, tile_n)
        gram = tl.dot(v, v.T).to(out.dtype.element_ty)
        tl.store(row + lead + pair, gram, mask=is_pair)
        if has_bottom:
            d = tl.arange(0, tile_dim)
            tl.store(row + d, tl.load(bottom + b * dim + d, mask=d < dim), mask=d < dim)
        if end < width:
            rest = end + tl.arange(0, tile_rest)
            zeros = tl.zeros((tile_rest,), out.dtype.element_ty)
            tl.store(row + rest, zeros, mask=rest < width)
        v = ahead


@triton.jit
@no_type_check
def dot_features_backward_kernel(
    bottom,
    embeddings,
    g,
    dbottom,
    dembeddings,
    batch: tl.constexpr,
    n: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    has_bottom: tl.constexpr,
    is_upper: tl.constexpr,
    has_equal: tl.constexpr,
    examples: tl.constexpr,
    tile_n: tl.constexpr,
    tile_dim: tl.constexpr,
):
    """Writes `S v`, S the symmetric matrix of the pairs' gradients, g added to row 0.

    Row 0 is rounded before the gradient of the bottom vector's own features is added,
    as if these were two operations.
    """
    lead: tl.constexpr = dim if has_bottom else 0
    first = tl.program_id(0) * examples
    for example in range(first, tl.minimum(first + examples, batch)):
        b = tl.cast(example, tl.int64)
        row = g + b * width
        at, inside = _vectors(
            bottom, embeddings, b, n, dim, has_bottom, tile_n, tile_dim
        )
        v = tl.load(at, mask=inside, other=0.0)
        pair, is_pair = _pairs(n, is_upper, has_equal, tile_n)
        half = tl.load(row + lead + pair, mask=is_pair, other=0.0)
        # Exact: one of the two summands is zero, or they are equal.
        dv = tl.dot(half + half.T, v).to(v.dtype)
        at, inside = _vectors(
            dbottom, dembeddings, b, n, dim, has_bottom, tile_n, tile_dim
        )
        if has_bottom:
            i = tl.arange(0, tile_n)[:, None]
            own = inside & (i == 0)
            d = tl.arange(0, tile_dim)[None, :]
            dv += tl.load(row + d + tl.zeros_like(i), mask=own, other=0.0)
        tl.store(at, dv, mask=inside)


@triton.jit
@no_type_check
def _load(
    bottom,
    embeddings,
    example,
    n: tl.constexpr,
    dim: tl.constexpr,
    has_bottom: tl.constexpr,
    tile_n: tl.constexpr,
    tile_dim: tl.constexpr,
):
    """Returns the vectors of an example, zeros past the end."""
    b = tl.cast(example, tl.int64)
    at, inside = _vectors(bottom, embeddings, b, n, dim, has_bottom, tile_n, tile_dim)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
@no_type_check
def _vectors(
    bottom,
    embeddings,
    b,
    n: tl.constexpr,
    dim: tl.constexpr,
    has_bottom: tl.constexpr,
    tile_n: tl.constexpr,
    tile_dim: tl.constexpr,
):
    """Returns pointers to the vectors of example `b`, and their mask."""
    i = tl.arange(0, tile_n)[:, None]
    d = tl.arange(0, tile_dim)[None, :]
    inside = (i < n) & (d < dim)
    if has_bottom:
        others = embeddings + b * ((n - 1) * dim) + (i - 1) * dim
        start = tl.where(i == 0, bottom + b * dim, others)
        if dim % 8 == 0:  # Triton 3.8 would load single values: it sees no alignment
            start = tl.multiple_of(start, (16, 16))
        return start + d, inside
    else:
        return embeddings + b * (n * dim) + i * dim + d, inside


@triton.jit
@no_type_check
def _pairs(
    n: tl.constexpr,
    is_upper: tl.constexpr,
    has_equal: tl.constexpr,
    tile_n: tl.constexpr,
):
    """Returns the index of each pair (i, j) among those of a triangle, and their mask.

    Indices are contiguous along j, so that neighbouring threads access neighbours.
    """
    i = tl.arange(0, tile_n)[:, None]
    j = tl.arange(0, tile_n)[None, :]
    equal: tl.constexpr = 1 if has_equal else 0
    if is_upper:
        start = i * (n - 1 + equal) - i * (i - 1) // 2 + equal - 1
        return start + j - i, (j > i - equal) & (j < n)
    else:
        return i * (i - 1 + 2 * equal) // 2 + j, (j < i + equal) & (i < n)
