"""Rows as bytes for the wire: bf16, or 8-bit codes and a scale for each row.

Payloads are unsigned integers. XLA would widen floats of 8 and 16 bits where a backend
has no collective for them, and integers travel as they are.

    f32     [L, C D] float32
    bf16    [L, C D] uint16
    e4m3    [L, C D + C] uint8: codes, then exponents of the scale_inv of each row
    int8    [L, C D + C] uint8, likewise

of L lists of C rows of D values: w is the width. Scales are powers of two, so that
decoding is exact in bfloat16. Rows that are not finite come back as infinities and NaN,
whatever the codec. Triton's kernels gather and encode, or decode and spread, at once.

Codes of rows that are only read are the nearest. Those of gradients and changes, which
are added up step after step, are right on average (`unbiased`): to the nearest, what is
less than a 254th of its row's largest value would never arrive.
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt32

from loka_jax import fp8, unbiased
from loka_jax.fp8 import E4M3
from loka_jax.mapped import by_kernel
from loka_jax.ops import embedding
from loka_jax.triton import Implementation, chosen
from loka_jax.triton import row_wire as _triton

Codec = Literal["f32", "bf16", "e4m3", "int8"]
CODECS = get_args(Codec)

_INT8_MAX = 127.0


def row_bytes(codec: Codec, dim: int) -> int:
    """Returns the bytes of a row of `dim` values on the wire."""
    return {"f32": 4 * dim, "bf16": 2 * dim}.get(codec, dim + 1)


def gather(
    rows: Float[Array, "R D"],
    ids: Int[Array, "L C"],
    codec: Codec,
    words: UInt32[Array, "2"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> Shaped[Array, "L w"]:
    """Returns the payload of the rows of some ids, of zeros for ids of no row.

    Args:
        ids: of the rows; those that are out of range, such as `BAD_ID`, have none.
        words: decide with the ids how codes of 8 bits are rounded; None rounds to the
            nearest.
        implementation: as in `embedding.sum_by_row`; all have the same bits of finite
            rows.

    Raises:
        ValueError: if Triton is required and cannot run.
    """
    why_not = _triton.why_not(codec, ids.size, rows.shape[1], rows.dtype)
    if chosen(implementation, why_not, "row_wire") == "triton":
        run = functools.partial(_triton.encode, codec=codec)
        return by_kernel(run, rows, ids, words)
    found = embedding.lookup(rows, ids)
    return encode(found, codec, None if words is None else (words, ids))


def scatter(
    payload: Shaped[Array, "L w"],
    slots: Int[Array, "N"],
    codec: Codec,
    dim: int,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "N D"]:
    """Returns the rows of some places in lists, zeros for numbers of no place.

    Float32 of "f32" and else bfloat16.

    Args:
        slots: numbers of places, those of a list one after the other.

    Raises:
        ValueError: if Triton is required and cannot run.
    """
    why_not = _triton.why_not(codec, slots.size, dim, jnp.bfloat16)
    if chosen(implementation, why_not, "row_wire") == "triton":
        run = functools.partial(_triton.decode, codec=codec, dim=dim)
        return by_kernel(run, payload, slots)
    return embedding.lookup(decode(payload, codec, dim).reshape(-1, dim), slots)


def encode(
    rows: Float[Array, "*L C D"],
    codec: Codec,
    rounding: tuple[UInt32[Array, "2"], Int[Array, "*L C"]] | None = None,
) -> Shaped[Array, "*L w"]:
    """Returns the payload of lists of rows.

    Args:
        rounding: words and a number of each row, which decide how codes of 8 bits are
            rounded; None rounds to the nearest.
    """
    width = rows.shape[-2] * rows.shape[-1]
    flat = rows.reshape(*rows.shape[:-2], width)
    if codec == "f32":
        return flat.astype(jnp.float32)
    if codec == "bf16":
        return jax.lax.bitcast_convert_type(flat.astype(jnp.bfloat16), jnp.uint16)
    rows = rows.astype(jnp.float32)
    amax = fp8.amax(rows, (-1,))
    is_e4m3 = codec == "e4m3"
    limit = fp8.fp8_max(E4M3) if is_e4m3 else _INT8_MAX
    scale_inv = fp8.compute_scale_inv(amax, E4M3) if is_e4m3 else _int8_scale_inv(amax)
    scaled = jnp.clip(rows / scale_inv, -limit, limit)
    if rounding is not None:
        u = unbiased.uniform(*rounding, rows.shape[-1])
        codes = (unbiased.to_e4m3 if is_e4m3 else unbiased.to_int8)(scaled, u)
    else:
        codes = scaled.astype(E4M3) if is_e4m3 else jnp.round(scaled).astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(scale_inv, jnp.uint32) >> np.uint32(23)
    exponent = jnp.where(jnp.isfinite(amax), bits, np.uint32(255)).astype(jnp.uint8)
    codes = jax.lax.bitcast_convert_type(codes, jnp.uint8).reshape(flat.shape)
    return jnp.concatenate([codes, exponent[..., 0]], axis=-1)


def decode(
    payload: Shaped[Array, "*L w"], codec: Codec, dim: int
) -> Float[Array, "*L C D"]:
    """Returns the lists of a payload, float32 of "f32" and else bfloat16."""
    lists = payload.shape[:-1]
    if codec == "f32":
        return payload.reshape(*lists, -1, dim)
    if codec == "bf16":
        rows = jax.lax.bitcast_convert_type(payload, jnp.bfloat16)
        return rows.reshape(*lists, -1, dim)
    capacity = payload.shape[-1] // (dim + 1)
    codes, exponents = jnp.split(payload, [capacity * dim], axis=-1)
    dtype = E4M3 if codec == "e4m3" else jnp.int8
    codes = jax.lax.bitcast_convert_type(codes, dtype).reshape(*lists, capacity, dim)
    # Infinite for a row that was not finite.
    bits = exponents.astype(jnp.uint32) << np.uint32(23)
    scale_inv = jax.lax.bitcast_convert_type(bits, jnp.float32)[..., None]
    return (codes.astype(jnp.float32) * scale_inv).astype(jnp.bfloat16)


def _int8_scale_inv(amax: Float[Array, "*N 1"]) -> Float[Array, "*N 1"]:
    """Returns the least power of two that takes `amax` to 127 or less."""
    least = float(jnp.finfo(jnp.float32).tiny)
    ratio = jnp.where(jnp.isfinite(amax), jnp.maximum(amax / _INT8_MAX, least), 1.0)
    bits = jax.lax.bitcast_convert_type(ratio, jnp.uint32) + np.uint32(0x7FFFFF)
    return jax.lax.bitcast_convert_type(bits & np.uint32(0x7F800000), jnp.float32)
