"""Packing of vectors in 8 bits by XLA, the reference of `triton.packed`.

Letters as in `loka_jax.packed`: m values, n parts of k blocks of b values, w bytes of a
packed part.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8, UInt32

from loka_jax import fp8, unbiased
from loka_jax.fp8 import E4M3
from loka_jax.packed import SCALE_BYTES, Packing


def pack(
    x: Float[Array, "m"], words: UInt32[Array, "2"], packing: Packing
) -> UInt8[Array, "n w"]:
    """Returns the packed parts of a vector; words decide how they are rounded."""
    padding = packing.parts * packing.part - packing.size
    x = jnp.pad(x.astype(jnp.float32), (0, padding))
    x = x.reshape(packing.parts, packing.blocks, packing.block)
    return _pack(x, words, packing)


def sum_packed(
    packed: UInt8[Array, "n w"], words: UInt32[Array, "2"], packing: Packing
) -> UInt8[Array, "1 w"]:
    """Returns the packed sum of n packed parts, added up in float32 in their order."""
    total = functools.reduce(jnp.add, _unpack(packed, packing))
    return _pack(total[None], words, packing)


def unpack(
    packed: UInt8[Array, "p w"], packing: Packing, dtype: DTypeLike = jnp.float32
) -> Float[Array, "m"]:
    """Returns the vector of these parts in a dtype; of v vectors' parts, their sum.

    Added up in float32, in the order of the vectors.
    """
    blocks = _unpack(packed, packing)
    vectors = blocks.reshape(-1, packing.parts, *blocks.shape[1:])
    total = functools.reduce(jnp.add, vectors)
    return total.ravel()[: packing.size].astype(dtype)


def _pack(
    blocks: Float[Array, "p k b"], words: UInt32[Array, "2"], packing: Packing
) -> UInt8[Array, "p w"]:
    amax = fp8.amax(blocks, (2,))
    # As in `fp8.compute_scale_inv`: no scale overflows, no factor is subnormal.
    floor = 2 * packing.limit * float(jnp.finfo(jnp.float32).tiny)
    scale = packing.limit / jnp.maximum(amax, floor)
    scale_inv = jnp.where(jnp.isfinite(amax), 1.0 / scale, jnp.nan)
    scaled = jnp.clip(blocks * scale, -packing.limit, packing.limit)
    numbers = jnp.arange(amax.size, dtype=jnp.int32).reshape(amax.shape[:2])
    u = unbiased.uniform(words, numbers, packing.block)
    is_int8 = packing.format == "int8"
    codes = (unbiased.to_int8 if is_int8 else unbiased.to_e4m3)(scaled, u)
    parts = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (codes, scale_inv))
    return jnp.concatenate([x.reshape(len(blocks), -1) for x in parts], axis=1)


def _unpack(packed: UInt8[Array, "p w"], packing: Packing) -> Float[Array, "p k b"]:
    codes, scales = jnp.split(packed, [packing.part], axis=1)
    shape = (len(packed), packing.blocks)
    dtype = jnp.int8 if packing.format == "int8" else E4M3
    codes = jax.lax.bitcast_convert_type(codes.reshape(*shape, packing.block), dtype)
    scales = scales.reshape(*shape, SCALE_BYTES)
    scale_inv = jax.lax.bitcast_convert_type(scales, jnp.float32)
    return codes.astype(jnp.float32) * scale_inv[..., None]
