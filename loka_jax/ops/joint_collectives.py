"""One collective for several arrays, inside of a `jax.shard_map`.

Each launch of a collective costs the host some 50 us, more than GPUs take for a few
numbers. Arrays travel side by side: in an all-to-all in words of the smallest of their
types, unsigned integers, in a sum in float32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Shaped

type Axes = str | tuple[str, ...]


def swap(tree: Any, axis: str) -> Any:
    """Returns the part of each device's arrays [L, ...] that is for this one.

    Args:
        tree: of arrays with a part for each of the L devices, of 8 to 32 bits.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) == 1:
        return treedef.unflatten([_all_to_all(leaves[0], axis)])
    word = np.dtype(f"uint{8 * min(x.dtype.itemsize for x in leaves)}")
    words = [_as_words(x, word) for x in leaves]
    received = _all_to_all(jnp.concatenate(words, axis=1), axis)
    ends = np.cumsum([x.shape[1] for x in words])[:-1]
    parts = jnp.split(received, ends, axis=1)
    return treedef.unflatten(map(_from_words, parts, leaves))


def sum_all(tree: Any, axes: Axes) -> Any:
    """Returns the sum of trees over all devices, in float32.

    Whole numbers are exact below 2^24.
    """
    floats = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    flat, unflatten = ravel_pytree(floats)
    total = unflatten(jax.lax.psum(flat, axes))
    return jax.tree.map(lambda x, like: x.astype(like.dtype), total, tree)


def max_all(tree: Any, axes: Axes) -> Any:
    """Returns the element-wise maximum of float32 trees over all devices."""
    flat, unflatten = ravel_pytree(tree)
    return unflatten(jax.lax.pmax(flat, axes))


def gather_all(tree: Any, axes: Axes) -> Any:
    """Returns the arrays of 32-bit numbers of all devices, along a new axis 0."""
    return gathered_by(jax.lax.psum(to_gather(tree, axes), axes), tree)


def to_gather(tree: Any, axes: Axes) -> Float[Array, "L K"]:
    """Returns what to add up over all L devices, in any sum, for `gathered_by`.

    The sum keeps all bits, as each device adds zeros to the numbers of the others, and
    float32 has all whole numbers of 16 bits.

    Args:
        tree: of arrays of 32-bit numbers.
    """
    leaves = jax.tree.leaves(tree)
    words = jnp.concatenate(
        [jax.lax.bitcast_convert_type(x, jnp.uint32).ravel() for x in leaves]
    )
    halves = jnp.concatenate([words >> 16, words & 0xFFFF]).astype(jnp.float32)
    everyones = jnp.zeros((jax.lax.axis_size(axes), halves.size), jnp.float32)
    return everyones.at[jax.lax.axis_index(axes)].set(halves)


def gathered_by(total: Float[Array, "L K"], tree: Any) -> Any:
    """Returns the numbers of all devices from the sum of what `to_gather` gave."""
    high, low = jnp.split(total.astype(jnp.uint32), 2, axis=1)
    leaves, treedef = jax.tree.flatten(tree)
    parts = jnp.split(
        high << 16 | low, np.cumsum([x.size for x in leaves])[:-1], axis=1
    )
    return jax.tree.unflatten(
        treedef,
        [
            jax.lax.bitcast_convert_type(part, x.dtype).reshape(-1, *x.shape)
            for part, x in zip(parts, leaves, strict=True)
        ],
    )


def _all_to_all(array: Array, axis: str) -> Array:
    return jax.lax.all_to_all(array, axis, 0, 0, tiled=True)


def _as_words(array: Array, word: np.dtype) -> Shaped[Array, "L W"]:
    """Returns an array as words; those of a value are side by side."""
    return jax.lax.bitcast_convert_type(array, word).reshape(len(array), -1)


def _from_words(words: Shaped[Array, "L W"], like: Array) -> Array:
    """Returns the array of such words, of the shape and type of another."""
    per_value = math.ceil(like.dtype.itemsize / words.dtype.itemsize)
    shape = like.shape + (per_value,) * (per_value > 1)
    return jax.lax.bitcast_convert_type(words.reshape(shape), like.dtype)
