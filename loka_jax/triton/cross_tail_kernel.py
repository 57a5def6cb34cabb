"""The kernels of a cross network's tails. Importing this module imports Triton."""

import triton.language as tl

from loka_jax.triton.jit import jit
from loka_jax.triton.tail_kernel import (
    columns_of,
    decode,
    first_of_tile,
    once,
    read_part,
    read_vector,
    store_dots,
    store_part,
    store_row_sums,
    store_sums,
    write,
)


@jit
def cross_tail_kernel(given, out, of):
    """Writes `y = x0 * (outer + z_1 + ... + z_p + bias)`, and sums of y.

    Of its rows partial sums, and of its columns, each times a weight of the head.
    """
    row, column = first_of_tile(of)
    c = tl.zeros((of.block_m, of.block_n), tl.float32)
    if given.outer is not None:
        e = read_vector(given.outer.column, row, of.m, of.block_m)[:, None]
        c += e * columns_of(given.outer.row, column, of)
    for i in tl.static_range(len(given.summands)):
        c += decode(given.summands[i], row, column, of)
    if given.bias is not None:
        c += columns_of(given.bias, column, of)
    tile = c * decode(given.x0, row, column, of)
    if out.row_sums is not None:
        tile = once(tile)
        store_row_sums(out.row_sums, tile, row, column, of)
    if out.dots is not None:
        store_dots(out.dots, tile, given.head, row, column, of)
    write(tile, out.y, given.scale_inv, row, column, of)


@jit
def cross_gradient_kernel(given, out, of):
    """Writes `d_0 + sum over l of d_l * s_l`, `s_l = 1 + z_1 + .. + z_l`.

    Each z with its bias. An outer product may be added to the last d; the gradient of
    its row is written, too, as partial sums of e * x0 * s.
    """
    row, column = first_of_tile(of)
    c = tl.zeros((of.block_m, of.block_n), tl.float32)
    for j in tl.static_range(len(given.gradients[0])):
        c += decode(given.gradients[0][j], row, column, of)
    s = tl.full((of.block_m, of.block_n), 1.0, tl.float32)
    for i in tl.static_range(len(given.products)):
        s += decode(given.products[i], row, column, of)
        if given.biases[i] is not None:
            s += columns_of(given.biases[i], column, of)
        for j in tl.static_range(len(given.gradients[i + 1])):
            c += s * decode(given.gradients[i + 1][j], row, column, of)
    if given.outer is not None:
        e = read_vector(given.outer.column, row, of.m, of.block_m)[:, None]
        x = decode(given.x0, row, column, of)
        store_sums(out.head_sums, tl.sum(e * x * s, axis=0), row, column, of)
        c += e * s * columns_of(given.outer.row, column, of)
    # Most tiles have columns of one part alone.
    start: tl.constexpr = out.parts[0].shape[1]
    if column < start:
        store_part(out.parts[0], c, row, column, 0, of)
    if len(out.parts) > 1:
        if column + of.block_n > start:
            store_part(out.parts[1], c, row, column, start, of)


@jit
def joined_cast_kernel(given, out, of):
    """Writes the columns of all parts, then zeros."""
    row, column = first_of_tile(of)
    tile = tl.zeros((of.block_m, of.block_n), tl.float32)
    for i in tl.static_range(len(given.parts)):
        # Most tiles have columns of one part alone.
        is_after = column >= of.starts[i] + given.parts[i].shape[1]
        if (column + of.block_n > of.starts[i]) & (not is_after):
            tile += read_part(given.parts[i], row, column, of.starts[i], of)
    write(tile, out, given.scale_inv, row, column, of)
