"""What the kernels of tails share. Importing this module imports Triton.

A program computes tiles of `of.block_m` rows by `of.block_n` columns of a matrix of
`of.m` rows and `of.n` columns, which is written of `of.out_m` rows and `of.out_n`
columns. What lies past the end of an operand is read as zeros; what lies past the end
of the matrix is written as zeros. Operands are trees, see `trees`.
"""

import triton.language as tl

from loka_jax.triton.jit import jit

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 but its sign


@jit
def first_of_tile(of):
    """Returns the first row and column of this program's tile."""
    tiles_n: tl.constexpr = (of.out_n + of.block_n - 1) // of.block_n
    program = tl.program_id(0)
    return program // tiles_n * of.block_m, program % tiles_n * of.block_n


@jit
def _place(x, row, column, rows: tl.constexpr, columns: tl.constexpr):
    """Returns pointers to a tile of an array, and which of them lie inside of it."""
    i = (row + tl.arange(0, rows))[:, None]
    j = (column + tl.arange(0, columns))[None, :]
    # Beyond 2^31 elements the offsets of rows need 64 bits.
    at = x.at + i.to(tl.int64) * x.shape[1] + j
    return at, (i < x.shape[0]) & (j < x.shape[1])


@jit
def read(x, row, column, of):
    """Returns a tile of an array in float32."""
    at, inside = _place(x, row, column, of.block_m, of.block_n)
    m: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    if (m >= of.out_m and m % of.block_m == 0) and (
        n >= of.out_n and n % of.block_n == 0
    ):
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@jit
def decode(x, row, column, of):
    """Returns a tile of a `Scaled` matrix times its unit and scales.

    Not times their product, which may vanish.
    """
    tile = read(x.data, row, column, of)
    for i in tl.static_range(len(x.scales)):
        tile *= tl.load(x.scales[i]) * (x.unit if i == 0 else 1.0)
    return tile


@jit
def read_vector(x, first, size: tl.constexpr, block: tl.constexpr):
    """Returns the entries of a tile's columns, or of its rows, zeros past the end."""
    places = first + tl.arange(0, block)
    return tl.load(x.at + places, mask=places < size, other=0.0)


@jit
def columns_of(x, column, of):
    """Returns the entries of a tile's columns, as a row."""
    return read_vector(x, column, of.n, of.block_n)[None, :]


@jit
def cut(tile, row, column, of):
    """Returns a tile with zeros past the end of the matrix."""
    if (of.m == of.out_m and of.m % of.block_m == 0) and (
        of.n == of.out_n and of.n % of.block_n == 0
    ):
        return tile
    else:
        i = (row + tl.arange(0, of.block_m))[:, None]
        j = (column + tl.arange(0, of.block_n))[None, :]
        return tl.where((i < of.m) & (j < of.n), tile, 0.0)


@jit
def store(x, tile, row, column, rows: tl.constexpr, columns: tl.constexpr):
    """Writes a tile of rows by columns in the dtype of the array."""
    at, inside = _place(x, row, column, rows, columns)
    tile = tile.to(x.at.dtype.element_ty)
    if x.shape[0] % rows == 0 and x.shape[1] % columns == 0:
        tl.store(at, tile)
    else:
        tl.store(at, tile, mask=inside)


@jit
def _places(x, row, column, start: tl.constexpr, of):
    """Returns pointers to a tile's elements in a row, and which of them are there.

    Of a matrix whose columns from `start` on are an array.
    """
    place = tl.arange(0, of.block_m * of.block_n)
    rows, columns = row + place // of.block_n, column + place % of.block_n - start
    inside = (rows < x.shape[0]) & (columns >= 0) & (columns < x.shape[1])
    return x.at + rows.to(tl.int64) * x.shape[1] + columns, inside


@jit
def read_part(x, row, column, start: tl.constexpr, of):
    """Returns a tile in float32 whose columns from `start` on are an array, else 0."""
    width: tl.constexpr = x.shape[1]
    # Few programs read an array that is narrower than a tile.
    if (start % 16 == 0 and width % 16 == 0) or width < of.block_n:
        at, inside = _place(x, row, column - start, of.block_m, of.block_n)
        inside = inside & (column + tl.arange(0, of.block_n) >= start)[None, :]
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        # Numbers one by one. As a vector neighbouring threads read neighbouring ones;
        # as a matrix they would be as far apart as the stores of the result want them.
        at, inside = _places(x, row, column, start, of)
        tile = tl.load(at, mask=inside, other=0.0)
        return tl.reshape(tile, (of.block_m, of.block_n)).to(tl.float32)


@jit
def store_part(x, tile, row, column, start: tl.constexpr, of):
    """Writes the columns of a tile that are an array from `start` on."""
    tile = tile.to(x.at.dtype.element_ty)
    if start % 16 == 0 and x.shape[1] % 16 == 0:
        at, inside = _place(x, row, column - start, of.block_m, of.block_n)
        inside = inside & (column + tl.arange(0, of.block_n) >= start)[None, :]
        tl.store(at, tile, mask=inside)
    else:
        # Numbers one by one: of a vector neighbouring threads write neighbours.
        at, inside = _places(x, row, column, start, of)
        tl.store(at, tl.reshape(tile, (of.block_m * of.block_n,)), mask=inside)


@jit
def store_sums(x, sums, row, column, of):
    """Writes sums over rows of a tile's columns to the row of this tile's number."""
    columns = column + tl.arange(0, of.block_n)
    at = x.at + row // of.block_m * of.n + columns
    tl.store(at, sums, mask=columns < of.n)


@jit
def store_row_sums(x, tile, row, column, of):
    """Writes sums over a tile's rows, its elements rounded to bfloat16.

    They are a product with ones: sums over threads, in which most of a tile's rows lie,
    would take as long as the tail itself. The rounding is that of the gradients that
    the tail reads, and those that XLA writes in bfloat16.
    """
    ones = tl.full((16, of.block_m), 1.0, tl.float32).to(tl.bfloat16)
    sums = tl.dot(ones, tile.to(tl.bfloat16))
    first = (tl.arange(0, 16) == 0)[:, None]
    columns = (column + tl.arange(0, of.block_n))[None, :]
    at = x.at + row // of.block_m * of.n + columns + tl.zeros((16, 1), tl.int32)
    tl.store(at, sums, mask=first & (columns < of.n))


@jit
def store_dots(dots, tile, vector, row, column, of):
    """Writes a tile's rows times a vector to the row of this column's number."""
    rows = row + tl.arange(0, of.block_m)
    at = dots.at + (column // of.block_n).to(tl.int64) * of.m + rows
    products = tile * columns_of(vector, column, of)
    tl.store(at, tl.sum(products, axis=1), mask=rows < of.m)


@jit
def write(tile, out, scale_inv, row, column, of):
    """Writes a tile of a result in every form of a `Written`, and the tile's amax."""
    tile = cut(tile, row, column, of)
    largest = _row_largest(tile)
    if out.bf16 is not None:
        store(out.bf16, tile, row, column, of.block_m, of.block_n)
    if out.fp8 is not None:
        factor = 1.0 / tl.load(scale_inv)
        # The conversion saturates, and keeps NaN (PTX's cvt.satfinite).
        cast = once(tile * factor).to(out.fp8.at.dtype.element_ty)
        store(out.fp8, cast, row, column, of.block_m, of.block_n)
        if out.fp8_t is not None:
            cast = tl.trans(cast)
            store(out.fp8_t, cast, column, row, of.block_n, of.block_m)
    if out.amaxes is not None:
        tiles_n: tl.constexpr = (of.out_n + of.block_n - 1) // of.block_n
        at = out.amaxes.at + row // of.block_m * tiles_n + column // of.block_n
        amax = tl.max(largest, axis=0)
        tl.store(at, amax.to(tl.float32, bitcast=True), mask=row < of.out_m)


@jit
def once(tile):
    """Returns the tile, which is computed once for all its readers.

    Else Triton computes it again, from its loads on, for each layout in which it is
    used. What has side effects it does not repeat.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=f,f", [tile], tl.float32, is_pure=False, pack=1
    )


@jit
def _row_largest(tile):
    """Returns the largest magnitude of each row of a tile, as the bits of a float32.

    Of integers, in whose order a NaN lies above infinity: a maximum of floats drops it.
    """
    return tl.max(tile.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)
