"""The kernels of `packed`. Importing this module imports Triton.

A program has a tile of whole blocks, a row of the tile each, and the number of a block
counts through all parts: its values begin at `number * block` in the vector, and its
codes as many bytes later as the factors of the parts before take.
"""

import triton.language as tl

from loka_jax.triton.jit import jit
from loka_jax.triton.unbiased_kernel import to_e4m3, to_int8, uniform

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 but its sign
_INFINITY = tl.constexpr(0x7F800000)  # from here on bits are infinite or NaN
_TINY = tl.constexpr(2.0**-126)  # the smallest normal float32
_SCALE_BYTES = tl.constexpr(4)
_MAX_UNROLLED = tl.constexpr(8)


@jit
def pack_kernel(given, out, of):
    """Writes codes and factors of a vector."""
    number, at = _blocks(of)
    values = tl.load(given.x.at + at, mask=at < of.size, other=0.0).to(tl.float32)
    _store(out.at, values, given.words.at, number, of.parts, of)


@jit
def sum_kernel(given, out, of):
    """Writes codes and factors of the sum of the parts."""
    number, _ = _blocks(of)
    unrolled: tl.constexpr = of.parts if of.parts < _MAX_UNROLLED else _MAX_UNROLLED
    values = _load(given.packed.at, number, 1, of)
    for part in tl.range(1, of.parts, loop_unroll_factor=unrolled):
        start = tl.cast(part, tl.int64) * (of.blocks * (of.block + _SCALE_BYTES))
        values += _load(given.packed.at + start, number, 1, of)
    _store(out.at, values, given.words.at, number, 1, of)


@jit
def unpack_kernel(given, out, of):
    """Writes the sum of the vectors of codes and factors."""
    number, at = _blocks(of)
    values = _load(given.packed.at, number, of.parts, of)
    for vector in tl.static_range(1, of.vectors):
        start = vector * of.parts * (of.blocks * (of.block + _SCALE_BYTES))
        values += _load(given.packed.at + start, number, of.parts, of)
    tl.store(out.at + at, values.to(out.at.dtype.element_ty), mask=at < of.size)


@jit
def _blocks(of):
    """Returns the numbers of a program's blocks, and the places of their values."""
    number = tl.program_id(0) * of.tile + tl.arange(0, of.tile)
    return number, number.to(tl.int64)[:, None] * of.block + tl.arange(0, of.block)


@jit
def _places(packed, number, of):
    """Returns pointers to the codes of blocks, and to their factors."""
    part = (number // of.blocks).to(tl.int64)
    codes = number.to(tl.int64) * of.block + part * (of.blocks * _SCALE_BYTES)
    # The factors of a part follow all of its codes.
    scales = (part + 1) * (of.blocks * of.block) + number.to(tl.int64) * _SCALE_BYTES
    at = packed + codes[:, None] + tl.arange(0, of.block)
    return at, (packed + scales).to(tl.pointer_type(tl.float32), bitcast=True)


@jit
def _load(packed, number, parts: tl.constexpr, of):
    """Returns the values of blocks in float32, zeros past the last."""
    at, scales = _places(packed, number, of)
    exists = number < parts * of.blocks
    codes = tl.load(at, mask=exists[:, None], other=0)
    scale_inv = tl.load(scales, mask=exists, other=0.0)
    if of.is_int8:
        codes = codes.to(tl.int8, bitcast=True)
    else:
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(tl.float32) * scale_inv[:, None]


@jit
def _store(packed, values, words, number, parts: tl.constexpr, of):
    """Writes codes and factors of blocks."""
    # As integers, among which NaN lies above infinity: a maximum of floats drops it.
    bits = tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)
    amax = bits.to(tl.float32, bitcast=True)
    limit: tl.constexpr = of.limit
    scale = tl.div_rn(tl.zeros_like(amax) + limit, tl.maximum(amax, 2 * limit * _TINY))
    scale_inv = tl.div_rn(tl.zeros_like(amax) + 1.0, scale)
    scale_inv = tl.where(bits < _INFINITY, scale_inv, float("nan"))
    # The factor is NaN for a block that is not finite, whatever its codes are.
    scaled = tl.clamp(values * scale[:, None], -limit, limit)
    u = uniform(words, number, tl.arange(0, of.block))
    codes = to_int8(scaled, u) if of.is_int8 else to_e4m3(scaled, u)
    at, scales = _places(packed, number, of)
    exists = number < parts * of.blocks
    tl.store(at, codes, mask=exists[:, None])
    tl.store(scales, scale_inv, mask=exists)
