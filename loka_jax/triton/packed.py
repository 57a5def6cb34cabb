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
from loka_jax.triton.launch import require_triton
from loka_jax.triton.trees import launch_tree, static

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

    given, out = static(x=x, words=words), _rows(packing.parts, packing)
    blocks = packing.parts * packing.blocks
    return _run(packed_kernel.pack_kernel, given, out, blocks, packing, _PACK)


def sum_packed(
    packed: UInt8[Array, "n w"], words: UInt32[Array, "2"], packing: Packing
) -> UInt8[Array, "1 w"]:
    """Returns the packed sum of n packed parts, added up in float32 in their order.

    Raises:
        ImportError: if jax-triton is not installed.
    """
    _check("sum_packed", packing)
    from loka_jax.triton import packed_kernel

    given, out = static(packed=packed, words=words), _rows(1, packing)
    kernel = packed_kernel.sum_kernel
    return _run(kernel, given, out, packing.blocks, packing, _SUM)


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
    of = dict(vectors=len(packed) // packing.parts)
    kernel, given = packed_kernel.unpack_kernel, static(packed=packed)
    return _run(kernel, given, out, blocks, packing, _UNPACK, **of)


def _rows(count: int, packing: Packing) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, packing.row_bytes), jnp.uint8)


def _run(
    kernel: Any,
    given: Any,
    out: jax.ShapeDtypeStruct,
    blocks: int,
    packing: Packing,
    config: tuple[int, int],
    **constants: int,
) -> Any:
    """Returns the result of a kernel whose programs share `blocks` blocks."""
    values, num_warps = config
    tile = values // packing.block
    of = static(
        **dict(size=packing.size, parts=packing.parts, blocks=packing.blocks),
        **dict(block=packing.block, tile=tile, limit=packing.limit),
        is_int8=packing.format == "int8",
        **constants,
    )
    grid = -(-blocks // tile)
    return launch_tree(kernel, given, out, of, grid=grid, num_warps=num_warps)


def _check(name: str, packing: Packing, dtype: DTypeLike = jnp.float32) -> None:
    reason = why_not(packing, dtype)
    if reason is not None:
        raise ValueError(f"{name}: {reason}.")
    require_triton()
