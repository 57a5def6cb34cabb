"""The kernels of `row_wire`. Importing this module imports Triton.

A program has a tile of rows. Scales are powers of two, found from the bits of the
largest magnitude, so that codes are those of `ops.row_codec` bit for bit.
"""

import triton.language as tl

from loka_jax.triton.jit import jit
from loka_jax.triton.unbiased_kernel import to_e4m3, to_int8, uniform

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 but its sign
_EXPONENT = tl.constexpr(0x7F800000)  # its exponent; from here on infinite or NaN
_MANTISSA_BITS = tl.constexpr(23)
_INVERSE = tl.constexpr(254 << 23)  # minus the bits of a power of two: of its inverse
_TINY = tl.constexpr(2.0**-126)  # the smallest normal float32
_E4M3_MAX = tl.constexpr(448.0)
_INT8_MAX = tl.constexpr(127.0)
# Added to a float32 of at most 2^22 it leaves the nearest integer, ties to even, in the
# lowest bits, in two's complement.
_ROUND = tl.constexpr(1.5 * 2**23)


@jit
def encode_kernel(given, out, of):
    """Writes the payload of the rows that lists ask for, zeros for other ids."""
    tiles: tl.constexpr = (of.capacity + of.tile - 1) // of.tile
    number = tl.program_id(0) // tiles
    entry = (tl.program_id(0) % tiles) * of.tile + tl.arange(0, of.tile)
    exists = entry < of.capacity
    first_id = given.ids.at + number.to(tl.int64) * of.capacity
    id = tl.load(first_id + entry, mask=exists, other=-1)
    is_row = (id >= 0) & (id < of.num_rows)
    d = tl.arange(0, of.tile_dim)[None, :]
    at = given.rows.at + id.to(tl.int64)[:, None] * of.dim + d
    x = tl.load(at, mask=is_row[:, None] & (d < of.dim), other=0.0).to(tl.float32)

    start = out.at + number.to(tl.int64) * of.width
    at = start + entry.to(tl.int64)[:, None] * of.dim + d
    inside = exists[:, None] & (d < of.dim)
    if of.codec == "bf16":
        tl.store(at, x.to(out.at.dtype.element_ty), mask=inside)
    else:
        scaled, exponent = _scaled(x, of.codec)
        if given.words is not None:
            u = uniform(given.words.at, id, d)
            codes = to_int8(scaled, u) if of.codec == "int8" else to_e4m3(scaled, u)
        elif of.codec == "int8":
            codes = (scaled + _ROUND).to(tl.int32, bitcast=True).to(tl.uint8)
        else:
            codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(at, codes, mask=inside)
        # The exponents of a list follow all of its codes.
        tl.store(start + of.capacity * of.dim + entry, exponent, mask=exists)


@jit
def decode_kernel(given, out, of):
    """Writes the row of each slot, zeros for other numbers."""
    i = tl.program_id(0) * of.tile + tl.arange(0, of.tile)
    slot = tl.load(given.slots.at + i, mask=i < of.n, other=-1)
    is_slot = (slot >= 0) & (slot < of.num_slots)
    start = given.payload.at + (slot // of.capacity).to(tl.int64) * of.width
    entry = (slot % of.capacity).to(tl.int64)
    d = tl.arange(0, of.tile_dim)[None, :]
    inside = is_slot[:, None] & (d < of.dim)
    codes = tl.load(start[:, None] + entry[:, None] * of.dim + d, mask=inside, other=0)
    if of.codec == "bf16":
        x = codes.to(tl.float32)
    else:
        exponent = tl.load(start + of.capacity * of.dim + entry, mask=is_slot, other=0)
        bits = exponent.to(tl.int32) << _MANTISSA_BITS
        if of.codec == "int8":
            codes = codes.to(tl.int8, bitcast=True)
        else:
            codes = codes.to(tl.float8e4nv, bitcast=True)
        x = codes.to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
    at = out.at + i.to(tl.int64)[:, None] * of.dim + d
    tl.store(at, x.to(out.at.dtype.element_ty), mask=(i < of.n)[:, None] & (d < of.dim))


@jit
def _scaled(x, codec: tl.constexpr):
    """Returns rows over their scales, and the exponents of these.

    255 for a row that is not finite.
    """
    # As integers, among which NaN lies above infinity: a maximum of floats drops it.
    magnitude = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)
    amax = magnitude.to(tl.float32, bitcast=True)
    is_finite = magnitude < _EXPONENT
    if codec == "int8":
        # The least power of two that takes the amax to 127 or less.
        ratio = tl.div_rn(amax, tl.zeros_like(amax) + _INT8_MAX)
        ratio = tl.where(is_finite, tl.maximum(ratio, _TINY), 1.0)
        bits = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) & _EXPONENT
        scale_inv = bits.to(tl.float32, bitcast=True)
        scaled = tl.div_rn(x, tl.zeros_like(x) + scale_inv[:, None])
        scaled = tl.clamp(scaled, -_INT8_MAX, _INT8_MAX)
    else:
        # The largest power of two that takes the amax to 448 or less.
        limit = tl.zeros_like(amax) + _E4M3_MAX
        scale = tl.div_rn(limit, tl.maximum(amax, 2 * _E4M3_MAX * _TINY))
        scale_bits = scale.to(tl.int32, bitcast=True) & _EXPONENT
        scale = scale_bits.to(tl.float32, bitcast=True)
        bits = _INVERSE - scale_bits  # of 1 / scale
        scaled = tl.clamp(x * scale[:, None], -_E4M3_MAX, _E4M3_MAX)
    exponent = tl.where(is_finite, bits >> _MANTISSA_BITS, 255)
    return scaled, exponent.to(tl.uint8)
