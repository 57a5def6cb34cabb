"""Rounding to codes of 8 bits that is right on average, by bits of a hash.

Values that share a scale with one much larger lie between 0 and the first code. To the
nearest they are 0 in every step, and what they add up to never arrives. Here one of the
two neighbours t and t + s of x is taken, by chance, s being their distance,

    rounded(x) = t + s (u < (x - t) / s),    u uniform in [0, 1)

so that E[rounded(x)] = x, with a variance of at most s^2 / 4. Values that are codes
stay. The distance is 1 in int8; in e4m3 it is an eighth of the power of two below x,
and of 2^-6 for all that is smaller.

u needs no state. It is a hash of two words, that of a step and of a device, of the
number n of a block or row, and of the lane d in it:

    a = hash32(hash32(n ^ k0) ^ k1),    u = (hash32(a + d 0x9E3779B9) >> 8) / 2^24

so that a step that is taken again is rounded again as it was. A value below 2^-24 of
the distance from 0 is 0 in nearly all steps.
"""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from loka_jax.fp8 import E4M3

type Words = Any  # uint32 arrays, of numpy or of JAX

_GOLDEN = np.uint32(0x9E3779B9)  # 2^32 over the golden ratio: lanes lie far apart
_EXPONENT = np.uint32(0x7F800000)  # bits of a float32
_E4M3_SMALLEST = np.uint32(121 << 23)  # 2^-6
_E4M3_MANTISSA = np.uint32(3 << 23)  # an eighth of a power of two
_INVERSE = np.uint32(254 << 23)  # minus the bits of a power of two: of its inverse


def hash32(x: Words) -> Words:
    """Returns a well mixed hash of each integer, bijectively: that of MurmurHash3."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def lane_bits(of_row: UInt32[Array, "*N"], lanes: int) -> UInt32[Array, "*N D"]:
    """Returns the random bits of the lanes of rows, from the hash of each row."""
    lane = jnp.arange(lanes, dtype=jnp.uint32) * _GOLDEN
    return hash32(of_row[..., None] + jnp.expand_dims(lane, range(of_row.ndim)))


def words_of(key: Array, axis_name: Hashable, roundings: int) -> UInt32[Array, "r 2"]:
    """Returns k0 and k1 of some roundings of this device.

    Args:
        key: of a step, the same on all devices.
        axis_name: of the mesh, one or several: devices differ.
    """
    key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
    return jax.random.bits(key, (roundings, 2), jnp.uint32)


def uniform(
    words: UInt32[Array, "2"], numbers: Int[Array, "*N"], lanes: int
) -> Float[Array, "*N D"]:
    """Returns u of all lanes of the blocks or rows with these numbers."""
    k0, k1 = words
    of_row = hash32(hash32(numbers.astype(jnp.uint32) ^ k0) ^ k1)
    bits = lane_bits(of_row, lanes) >> np.uint32(8)
    return bits.astype(jnp.float32) * np.float32(2.0**-24)


def to_int8(x: Float[Array, "*shape"], u: Float[Array, "*shape"]) -> Array:
    """Returns float32 values of at most 127 rounded to int8."""
    return _to_whole(x, u).astype(jnp.int8)


def to_e4m3(x: Float[Array, "*shape"], u: Float[Array, "*shape"]) -> Array:
    """Returns float32 values of at most 448 rounded to e4m3."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & _EXPONENT
    step = jnp.maximum(bits, _E4M3_SMALLEST) - _E4M3_MANTISSA
    step, inverse = (
        jax.lax.bitcast_convert_type(w, jnp.float32) for w in (step, _INVERSE - step)
    )
    return (_to_whole(x * inverse, u) * step).astype(E4M3)


def _to_whole(x: Float[Array, "*shape"], u: Float[Array, "*shape"]) -> Array:
    towards_zero = jnp.trunc(x)
    is_away = u < jnp.abs(x - towards_zero)
    return towards_zero + jnp.where(is_away, jnp.sign(x), 0)
