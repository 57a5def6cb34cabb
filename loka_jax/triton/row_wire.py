"""Casts of rows for the wire in Triton: gathered and packed, unpacked and spread.

    encode    rows[ids] -> codes and scales, at their places in the lists to be sent
    decode    the lists that came -> the row of each slot, in the order of the slots

A launch each. XLA gathers first, and casts in passes over what it has gathered. Letters
as in `ops.exchange`: L lists of C places, rows of D values; w is the width of a list's
payload, of which `ops.row_codec` says what it holds.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped, UInt32

from loka_jax.triton.launch import power_of_two, require_triton
from loka_jax.triton.trees import launch_tree, static

_MAX_DIM = 1024
_MAX_SLOTS = 2**31 - 2  # numbers of slots are int32
_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
_VALUES, _WARPS = 2048, 4  # of a program's tile, rows by D


def why_not(codec: str, slots: int, dim: int, dtype: DTypeLike) -> str | None:
    """Returns why rows are not served, or None if they are."""
    if codec == "f32":
        return "float32 is not cast"
    if slots <= 0 or not 0 < dim <= _MAX_DIM:
        return f"{slots} rows of D={dim} are none, or D is more than {_MAX_DIM}"
    if slots > _MAX_SLOTS:
        return f"{slots} rows are more than {_MAX_SLOTS}"
    if jnp.dtype(dtype) not in _DTYPES:
        return f"{jnp.dtype(dtype)} is neither float32 nor bfloat16"
    return None


def encode(
    rows: Float[Array, "R D"],
    ids: Int[Array, "L C"],
    words: UInt32[Array, "2"] | None = None,
    *,
    codec: str,
) -> Shaped[Array, "L w"]:
    """Returns the payload of the rows of some ids, of zeros for ids of no row.

    Args:
        words: decide with the ids how codes are rounded; None rounds to the nearest.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    lists, capacity = ids.shape
    num_rows, dim = rows.shape
    _check("encode", codec, ids.size, dim, rows.dtype)
    from loka_jax.triton import row_wire_kernel  # not above: it imports Triton

    width = capacity * dim + (codec != "bf16") * capacity
    dtype = jnp.bfloat16 if codec == "bf16" else jnp.uint8
    tile = _tile(dim)
    of = static(
        **dict(num_rows=num_rows, capacity=capacity, dim=dim, width=width),
        **dict(tile=tile, tile_dim=power_of_two(dim), codec=codec),
    )
    payload = launch_tree(
        row_wire_kernel.encode_kernel,
        static(rows=rows, ids=ids, words=words),
        jax.ShapeDtypeStruct((lists, width), dtype),
        of,
        grid=lists * -(-capacity // tile),
        num_warps=_WARPS,
    )
    if codec == "bf16":
        return jax.lax.bitcast_convert_type(payload, jnp.uint16)
    return payload


def decode(
    payload: Shaped[Array, "L w"], slots: Int[Array, "N"], codec: str, dim: int
) -> Float[Array, "N D"]:
    """Returns the rows of some slots in bfloat16, zeros for numbers of no slot.

    Args:
        slots: numbers of places in the lists, int32.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    lists, width = payload.shape
    capacity = width // (dim + (codec != "bf16"))
    _check("decode", codec, lists * capacity, dim)
    from loka_jax.triton import row_wire_kernel

    if codec == "bf16":
        payload = jax.lax.bitcast_convert_type(payload, jnp.bfloat16)
    tile = _tile(dim)
    of = static(
        **dict(n=slots.size, num_slots=lists * capacity, capacity=capacity, dim=dim),
        **dict(width=width, tile=tile, tile_dim=power_of_two(dim), codec=codec),
    )
    return launch_tree(
        row_wire_kernel.decode_kernel,
        static(payload=payload, slots=slots),
        jax.ShapeDtypeStruct((slots.size, dim), jnp.bfloat16),
        of,
        grid=-(-slots.size // tile),
        num_warps=_WARPS,
    )


def _tile(dim: int) -> int:
    """Returns the rows of a program."""
    return max(_VALUES // power_of_two(dim), 1)


def _check(
    name: str, codec: str, slots: int, dim: int, dtype: DTypeLike = jnp.float32
) -> None:
    reason = why_not(codec, slots, dim, dtype)
    if reason is not None:
        raise ValueError(f"{name}: {reason}.")
    require_triton()
