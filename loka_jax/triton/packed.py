"""Packing of vectors in 8 bits in Triton: a launch each to pack, to add up, to unpack.

Each reads its operand once and writes its result once, without arrays in between; XLA
takes several passes. Letters as in `loka_jax.packed`: m values, n parts of k blocks of
b values, w bytes of a packed part.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8, UInt32

from loka_jax.packed import Packing
from loka_jax.triton.launch import launch, require_triton

_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
_MAX_BLOCKS = 2**31 - 1  # numbers of blocks are int32


# Values of a tile, and warps of a program. Unpacking takes four values a thread, so
# that loads of codes and stores of float32 have one layout: with more, all values pass
# through shared memory.
_PACK, _SUM, _UNPACK = (2048, 4), (4096, 4), (1024, 8)


def why_not(packing: Packing, dtype: DTypeLike) -> str | None:
    """Returns why a vector is not served, or None if it is."""
    if jnp.dtype(dtype) not in _DTYPES:
        return f"{jnp.dtype(dtype)} is neither float32 nor bfloat16"
    blocks = packing.parts * packing.blocks
    if blocks > _MAX_BLOCKS:
        return f"{blocks} blocks are more than {_MAX_BLOCKS}"
    return None


def pack(
    x: Float[Array, "m"], words: UInt32[Array, "2"], packing: Packing
) -> UInt8[Array, "n w"]:
    """Returns the packed parts of a float32 or bfloat16 vector.

    Words decide how they are rounded.

    Raises:
        ValueError: if the vector is not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    _check("pack", packing, x.dtype)
    from loka_jax.triton import packed_kernel  # not above: it imports Triton

    out, operands = _rows(packing.parts, packing), (x, words)
    blocks, kernel = packing.parts * packing.blocks, packed_kernel.pack_kernel
    (packed,) = _run(kernel, operands, out, blocks, packing, _PACK)
    return packed


def sum_packed(
    packed: UInt8[Array, "n w"], words: UInt32[Array, "2"], packing: Packing
) -> UInt8[Array, "1 w"]:
    """Returns the packed sum of n packed parts, added up in float32 in their order.

    Raises:
        ImportError: if jax-triton is not installed.
    """
    _check("sum_packed", packing)
    from loka_jax.triton import packed_kernel

    out, blocks = _rows(1, packing), packing.blocks
    operands, kernel = (packed, words), packed_kernel.sum_kernel
    (total,) = _run(kernel, operands, out, blocks, packing, _SUM)
    return total


def unpack(
    packed: UInt8[Array, "p w"], packing: Packing, dtype: DTypeLike = jnp.float32
) -> Float[Array, "m"]:
    """Returns the vector of these parts, float32 or bfloat16; of v vectors', their sum.

    Added up in float32, in the order of the vectors.

    Raises:
        ValueError: if the dtype is not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    _check("unpack", packing, dtype)
    from loka_jax.triton import packed_kernel

    out = jax.ShapeDtypeStruct((packing.size,), dtype)
    blocks = packing.parts * packing.blocks
    vectors = len(packed) // packing.parts
    kernel = packed_kernel.unpack_kernel
    (x,) = _run(kernel, (packed,), out, blocks, packing, _UNPACK, vectors=vectors)
    return x


def _rows(count: int, packing: Packing) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, packing.row_bytes), jnp.uint8)


def _run(
    kernel: Any,
    operands: tuple[Array, ...],
    out: jax.ShapeDtypeStruct,
    blocks: int,
    packing: Packing,
    config: tuple[int, int],
    **constants: int,
):
    """Returns the results of a kernel whose programs share `blocks` blocks."""
    values, num_warps = config
    tile = values // packing.block
    return launch(
        kernel,
        *operands,
        outputs=[out],
        grid=-(-blocks // tile),
        num_warps=num_warps,
        num_stages=1,
        constants=dict(
            size=packing.size,
            parts=packing.parts,
            blocks=packing.blocks,
            block=packing.block,
            tile=tile,
            is_int8=packing.format == "int8",
            limit=packing.limit,
            **constants,
        ),
    )


def _check(name: str, packing: Packing, dtype: DTypeLike = jnp.float32) -> None:
    reason = why_not(packing, dtype)
    if reason is not None:
        raise ValueError(f"{name}: {reason}.")
    require_triton()
