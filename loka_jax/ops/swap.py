"""One all-to-all for several arrays.

Each launch of a collective costs the host some 50 us. Arrays travel side by side, in
words of the smallest of their types, unsigned integers. Inside of a `jax.shard_map`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped


def swapped(tree: Any, axis: str) -> Any:
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
