"""Rows as bytes for the wire: bf16, or 8-bit codes and a scale for each row.

Payloads are unsigned integers. XLA would widen floats of 8 and 16 bits where a backend
has no collective for them, and integers travel as they are.

    f32     [N, D] float32
    bf16    [N, D] uint16
    e4m3    [N, D + 1] uint8: the codes, and the exponent of the row's scale_inv
    int8    [N, D + 1] uint8, likewise

Scales are powers of two, so that decoding is exact in bfloat16. Rows that are not
finite come back as infinities and NaN, whatever the codec.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8

from loka_jax import fp8
from loka_jax.fp8 import E4M3

Codec = Literal["f32", "bf16", "e4m3", "int8"]
CODECS = get_args(Codec)

_INT8_MAX = 127.0


def row_bytes(codec: Codec, dim: int) -> int:
    """Returns the bytes of a row of `dim` values on the wire."""
    return {"f32": 4 * dim, "bf16": 2 * dim}.get(codec, dim + 1)


def encode(rows: Float[Array, "*N D"], codec: Codec) -> Shaped[Array, "*N _"]:
    """Returns the payload of rows."""
    if codec == "f32":
        return rows.astype(jnp.float32)
    if codec == "bf16":
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    rows = rows.astype(jnp.float32)
    amax = fp8.amax(rows, (-1,))
    if codec == "e4m3":
        scale_inv = fp8.compute_scale_inv(amax, E4M3)
        codes = fp8.cast(rows, scale_inv, E4M3).data
    else:
        scale_inv = _int8_scale_inv(amax)
        scaled = jnp.round(rows / scale_inv)
        codes = jnp.clip(scaled, -_INT8_MAX, _INT8_MAX).astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(scale_inv, jnp.uint32) >> np.uint32(23)
    exponent = jnp.where(jnp.isfinite(amax), bits, np.uint32(255)).astype(jnp.uint8)
    codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
    return jnp.concatenate([codes, exponent], axis=-1)


def decode(payload: Shaped[Array, "*N _"], codec: Codec) -> Float[Array, "*N D"]:
    """Returns the rows of a payload, float32 of "f32" and else bfloat16."""
    if codec == "f32":
        return payload
    if codec == "bf16":
        return jax.lax.bitcast_convert_type(payload, jnp.bfloat16)
    dtype = E4M3 if codec == "e4m3" else jnp.int8
    codes = jax.lax.bitcast_convert_type(payload[..., :-1], dtype)
    return (codes.astype(jnp.float32) * _scale_inv(payload)).astype(jnp.bfloat16)


def _scale_inv(payload: UInt8[Array, "*N _"]) -> Float[Array, "*N 1"]:
    """Returns the factors of the rows; infinite for a row that was not finite."""
    bits = payload[..., -1:].astype(jnp.uint32) << np.uint32(23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _int8_scale_inv(amax: Float[Array, "*N 1"]) -> Float[Array, "*N 1"]:
    """Returns the least power of two that takes `amax` to 127 or less."""
    least = float(jnp.finfo(jnp.float32).tiny)
    ratio = jnp.where(jnp.isfinite(amax), jnp.maximum(amax / _INT8_MAX, least), 1.0)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) + np.uint32(0x7FFFFF)
    return jax.lax.bitcast_convert_type(bits & np.uint32(0x7F800000), jnp.float32)
