"""The functions of `loka_jax.unbiased` for kernels. Importing this imports Triton."""

import triton.language as tl

from loka_jax.triton.jit import jit

_EXPONENT = tl.constexpr(0x7F800000)  # bits of a float32
_E4M3_SMALLEST = tl.constexpr(121 << 23)  # 2^-6
_E4M3_MANTISSA = tl.constexpr(3 << 23)  # an eighth of a power of two
_INVERSE = tl.constexpr(254 << 23)  # minus the bits of a power of two: of its inverse
_UNIT = tl.constexpr(2.0**-24)


@jit
def hash32(x):
    """Returns the finalizer of MurmurHash3 of uint32 values."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@jit
def uniform(words, number, lane):
    """Returns u [N, D] of the lanes [D] or [1, D] of blocks or rows [N]."""
    of_row = hash32(number.to(tl.uint32) ^ tl.load(words))
    of_row = hash32(of_row ^ tl.load(words + 1))
    bits = hash32(of_row[:, None] + lane.to(tl.uint32) * 0x9E3779B9) >> 8
    return bits.to(tl.int32).to(tl.float32) * _UNIT


@jit
def dropped(x, dropout, rows, columns):
    """Returns a tile [N, D] of rows [N] and columns [1, D] after dropout, if any."""
    if dropout is not None:
        u = uniform(dropout.words.at, rows, columns)
        x = tl.where(u < dropout.rate, 0.0, x * (1.0 / (1.0 - dropout.rate)))
    return x


@jit
def to_int8(x, u):
    """Returns the codes of finite values of at most 127, as uint8."""
    size = tl.abs(x)
    whole = size.to(tl.int32)
    whole += (u < size - whole.to(tl.float32)).to(tl.int32)
    return tl.where(x < 0, -whole, whole).to(tl.uint8)


@jit
def to_e4m3(x, u):
    """Returns the codes of finite values of at most 448, as uint8."""
    exponent = x.to(tl.int32, bitcast=True) & _EXPONENT
    step = tl.maximum(exponent, _E4M3_SMALLEST) - _E4M3_MANTISSA
    size = tl.abs(x) * (-step + _INVERSE).to(tl.float32, bitcast=True)
    whole = size.to(tl.int32).to(tl.float32)
    whole += (u < size - whole).to(tl.float32)
    size = whole * step.to(tl.float32, bitcast=True)
    codes = tl.where(x < 0, 0.0 - size, size).to(tl.float8e4nv)  # no -0
    return codes.to(tl.uint8, bitcast=True)
