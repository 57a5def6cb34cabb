"""The kernels of `packed`. Importing this module imports Triton.

A program has a tile of whole blocks, a row of the tile each, and the number of a block
counts through all parts: its values begin at `number * block` in the vector, and its
codes as many bytes later as the factors of the parts before take.

`no_type_check` exempts these functions, which Triton compiles from source, from the
tests' run-time type checks.
"""

# Triton is an optional extra; without it pyright resolves `triton` to this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import no_type_check

import triton
import triton.language as tl

from loka_jax.triton.unbiased_kernel import to_e4m3, to_int8, uniform

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # all bits of a float32 but its sign
_INFINITY = tl.constexpr(0x7F800000)  # from here on bits are infinite or NaN
_TINY = tl.constexpr(2.0**-126)  # the smallest normal float32
_SCALE_BYTES = tl.constexpr(4)
_MAX_UNROLLED = tl.constexpr(8)


@triton.jit
@no_type_check
def pack_kernel(
    x,
    words,
    packed,
    size: tl.constexpr,
    parts: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    is_int8: tl.constexpr,
    limit: tl.constexpr,
):
    """Writes codes and factors of a vector."""
    number = tl.program_id(0) * tile + tl.arange(0, tile)
    at = number.to(tl.int64)[:, None] * block + tl.arange(0, block)
    values = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    _store(packed, values, words, number, parts, blocks, block, is_int8, limit)


@triton.jit
@no_type_check
def sum_kernel(
    packed,
    words,
    total,
    size: tl.constexpr,
    parts: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    is_int8: tl.constexpr,
    limit: tl.constexpr,
):
    """Writes codes and factors of the sum of the parts."""
    number = tl.program_id(0) * tile + tl.arange(0, tile)
    unrolled: tl.constexpr = parts if parts < _MAX_UNROLLED else _MAX_UNROLLED
    values = _load(packed, number, 1, blocks, block, is_int8)
    for part in tl.range(1, parts, loop_unroll_factor=unrolled):
        row = packed + tl.cast(part, tl.int64) * (blocks * (block + _SCALE_BYTES))
        values += _load(row, number, 1, blocks, block, is_int8)
    _store(total, values, words, number, 1, blocks, block, is_int8, limit)


@triton.jit
@no_type_check
def unpack_kernel(
    packed,
    x,
    size: tl.constexpr,
    parts: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    is_int8: tl.constexpr,
    limit: tl.constexpr,
    vectors: tl.constexpr,
):
    """Writes the sum of the vectors of codes and factors."""
    number = tl.program_id(0) * tile + tl.arange(0, tile)
    values = _load(packed, number, parts, blocks, block, is_int8)
    for vector in tl.static_range(1, vectors):
        row = packed + vector * parts * (blocks * (block + _SCALE_BYTES))
        values += _load(row, number, parts, blocks, block, is_int8)
    at = number.to(tl.int64)[:, None] * block + tl.arange(0, block)
    tl.store(x + at, values.to(x.dtype.element_ty), mask=at < size)


@triton.jit
@no_type_check
def _places(
    packed, number, parts: tl.constexpr, blocks: tl.constexpr, block: tl.constexpr
):
    """Returns pointers to the codes of blocks, and to their factors."""
    part = (number // blocks).to(tl.int64)
    codes = number.to(tl.int64) * block + part * (blocks * _SCALE_BYTES)
    # The factors of a part follow all of its codes.
    scales = (part + 1) * (blocks * block) + number.to(tl.int64) * _SCALE_BYTES
    at = packed + codes[:, None] + tl.arange(0, block)
    return at, (packed + scales).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
@no_type_check
def _load(
    packed,
    number,
    parts: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    is_int8: tl.constexpr,
):
    """Returns the values of blocks in float32, zeros past the last."""
    at, scales = _places(packed, number, parts, blocks, block)
    exists = number < parts * blocks
    codes = tl.load(at, mask=exists[:, None], other=0)
    scale_inv = tl.load(scales, mask=exists, other=0.0)
    if is_int8:
        codes = codes.to(tl.int8, bitcast=True)
    else:
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(tl.float32) * scale_inv[:, None]


@triton.jit
@no_type_check
def _store(
    packed,
    values,
    words,
    number,
    parts: tl.constexpr,
    blocks: tl.constexpr,
    block: tl.constexpr,
    is_int8: tl.constexpr,
    limit: tl.constexpr,
):
    """Writes codes and factors of blocks."""
    # As integers, among which NaN lies above infinity: a maximum of floats drops it.
    bits = tl.max(values.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)
    amax = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.zeros_like(amax) + limit, tl.maximum(amax, 2 * limit * _TINY))
    scale_inv = tl.div_rn(tl.zeros_like(amax) + 1.0, scale)
    scale_inv = tl.where(bits < _INFINITY, scale_inv, float("nan"))
    # The factor is NaN for a block that is not finite, whatever its codes are.
    scaled = tl.clamp(values * scale[:, None], -limit, limit)
    u = uniform(words, number, tl.arange(0, block))
    codes = to_int8(scaled, u) if is_int8 else to_e4m3(scaled, u)
    at, scales = _places(packed, number, parts, blocks, block)
    exists = number < parts * blocks
    tl.store(at, codes, mask=exists[:, None])
    tl.store(scales, scale_inv, mask=exists)
