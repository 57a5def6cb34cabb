"""What the kernels of tails share. Importing this module imports Triton.

A program computes a tile of block_m rows by block_n columns of a matrix of m rows and n
columns, which is written of out_m rows and out_n columns. What lies past the end of an
operand is read as zeros; what lies past the end of the matrix is written as zeros.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 but its sign


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
    """Returns a tile in float32, zeros past the m rows and n columns of the operand."""
    at, inside = _place(matrix, row, column, m, n, block_m, block_n)
    if m % block_m == 0 and n % block_n == 0:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def cut(
    tile,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns a tile with zeros past the end of the matrix."""
    if m % block_m == 0 and n % block_n == 0:
        return tile
    else:
        rows = (row + tl.arange(0, block_m))[:, None]
        columns = (column + tl.arange(0, block_n))[None, :]
        return tl.where((rows < m) & (columns < n), tile, 0.0)


@triton.jit
@no_type_check
def read_vector(vector, first, size: tl.constexpr, block: tl.constexpr):
    """Returns the entries of a tile's columns, or of its rows, zeros past the end."""
    places = first + tl.arange(0, block)
    return tl.load(vector + places, mask=places < size, other=0.0)


@triton.jit
@no_type_check
def scaled(tile, first, second, count: tl.constexpr, unit: tl.constexpr):
    """Returns a tile times its scales, not times their product, which may vanish.

    The first one is in this unit.
    """
    if count > 0:
        tile *= tl.load(first) * unit
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
    """Writes a tile in the dtype of the matrix, of m rows and n columns."""
    at, inside = _place(matrix, row, column, m, n, block_m, block_n)
    tile = tile.to(matrix.dtype.element_ty)
    if m % block_m == 0 and n % block_n == 0:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=inside)


@triton.jit
@no_type_check
def _places(
    part,
    row,
    column,
    m: tl.constexpr,
    start: tl.constexpr,
    end: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns pointers to a tile's elements in a row, and which of them are there.

    Of a matrix of which an array is columns start to end.
    """
    place = tl.arange(0, block_m * block_n)
    rows, columns = row + place // block_n, column + place % block_n
    inside = (rows < m) & (columns >= start) & (columns < end)
    return part + rows.to(tl.int64) * (end - start) + (columns - start), inside


@triton.jit
@no_type_check
def load_part(
    part,
    row,
    column,
    m: tl.constexpr,
    start: tl.constexpr,
    end: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Returns a tile in float32 of which an array is columns start to end, else 0."""
    # Few programs read an array that is narrower than a tile.
    if (start % 16 == 0 and end % 16 == 0) or end - start < block_n:
        at, inside = _place(part, row, column - start, m, end - start, block_m, block_n)
        columns = (column + tl.arange(0, block_n))[None, :]
        inside = inside & (columns >= start)
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        # Numbers one by one. As a vector neighbouring threads read neighbouring ones;
        # as a matrix they would be as far apart as the stores of the result want them.
        at, inside = _places(part, row, column, m, start, end, block_m, block_n)
        tile = tl.load(at, mask=inside, other=0.0)
        return tl.reshape(tile, (block_m, block_n)).to(tl.float32)


@triton.jit
@no_type_check
def store_part(
    part,
    tile,
    row,
    column,
    m: tl.constexpr,
    start: tl.constexpr,
    end: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes the columns of a tile from `start` to `end`, those of an array."""
    tile = tile.to(part.dtype.element_ty)
    if start % 16 == 0 and end % 16 == 0:
        at, inside = _place(part, row, column - start, m, end - start, block_m, block_n)
        columns = (column + tl.arange(0, block_n))[None, :]
        tl.store(at, tile, mask=inside & (columns >= start))
    else:
        # Numbers one by one: of a vector neighbouring threads write neighbours.
        at, inside = _places(part, row, column, m, start, end, block_m, block_n)
        tl.store(at, tl.reshape(tile, (block_m * block_n,)), mask=inside)


@triton.jit
@no_type_check
def store_sums(
    sums,
    tile,
    row,
    column,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes the sums over a tile's rows to the row of this tile's number."""
    columns = column + tl.arange(0, block_n)
    at = sums + row // block_m * n + columns
    tl.store(at, tl.sum(tile, axis=0), mask=columns < n)


@triton.jit
@no_type_check
def store_dots(
    dots,
    tile,
    vector,
    row,
    column,
    m: tl.constexpr,
    n: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes a tile's rows times a vector to the row of this column's number."""
    rows = row + tl.arange(0, block_m)
    at = dots + (column // block_n).to(tl.int64) * m + rows
    products = tile * read_vector(vector, column, n, block_n)[None, :]
    tl.store(at, tl.sum(products, axis=1), mask=rows < m)


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
    out_m: tl.constexpr,
    out_n: tl.constexpr,
    has_bf16: tl.constexpr,
    has_fp8: tl.constexpr,
    has_fp8_t: tl.constexpr,
    has_amax: tl.constexpr,
    limit: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
):
    """Writes a tile of a result in every form, and the tile's amax."""
    tile = cut(tile, row, column, m, n, block_m, block_n)
    if has_bf16:
        store(out, tile, row, column, out_m, out_n, block_m, block_n)
    if has_fp8:
        cast = tile * (1.0 / tl.load(scale_inv))
        # NaN stays NaN.
        cast = tl.clamp(cast, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        cast = cast.to(out_fp8.dtype.element_ty)
        store(out_fp8, cast, row, column, out_m, out_n, block_m, block_n)
        if has_fp8_t:
            cast = tl.trans(cast)
            store(out_fp8_t, cast, column, row, out_n, out_m, block_n, block_m)
    if has_amax:
        tiles_n: tl.constexpr = (out_n + block_n - 1) // block_n
        _store_amax(amaxes + row // block_m * tiles_n + column // block_n, tile)


@triton.jit
@no_type_check
def _store_amax(amax, tile):
    """Writes the largest magnitude of a tile.

    Of integers, in whose order a NaN lies above infinity: a maximum of floats drops it.
    """
    bits = tile.to(tl.int32, bitcast=True) & _MAGNITUDE
    largest = tl.max(tl.max(bits, axis=1), axis=0)
    tl.store(amax, largest.to(tl.float32, bitcast=True))
