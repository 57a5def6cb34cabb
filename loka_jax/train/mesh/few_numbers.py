"""A few numbers of each device, brought to all of them.

By a collective of their own, or within a sum of float32 that is made anyway: a launch
of a collective takes the host longer than GPUs take for the numbers. A sum keeps their
bits, as each device adds zeros to the numbers of the others, and float32 has all whole
numbers of 16 bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from loka_jax.train.mesh.devices import AXES


def gathered(tree: Any) -> Any:
    """Returns what all devices have, along a new axis 0, by one collective.

    Args:
        tree: of arrays of 32-bit numbers.
    """
    return _as_tree(jax.lax.all_gather(_words(tree), AXES), tree)


def to_sum(tree: Any) -> Float[Array, "L K"]:
    """Returns what to add up over all L devices, for `from_sum`.

    Args:
        tree: of arrays of 32-bit numbers.
    """
    words = _words(tree)
    halves = jnp.concatenate([words >> 16, words & 0xFFFF]).astype(jnp.float32)
    everyones = jnp.zeros((jax.lax.axis_size(AXES), halves.size), jnp.float32)
    return everyones.at[jax.lax.axis_index(AXES)].set(halves)


def from_sum(total: Float[Array, "L K"], tree: Any) -> Any:
    """Returns what all devices have, along a new axis 0.

    Args:
        total: the sum of what `to_sum` gave on each.
        tree: of this device.
    """
    high, low = jnp.split(total.astype(jnp.uint32), 2, axis=1)
    return _as_tree(high << 16 | low, tree)


def _words(tree: Any) -> UInt32[Array, " n"]:
    leaves = jax.tree.leaves(tree)
    words = [jax.lax.bitcast_convert_type(x, jnp.uint32).ravel() for x in leaves]
    return jnp.concatenate(words)


def _as_tree(words: UInt32[Array, "L n"], tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    parts = jnp.split(words, np.cumsum([x.size for x in leaves])[:-1], axis=1)
    return jax.tree.unflatten(
        treedef,
        [
            jax.lax.bitcast_convert_type(part, x.dtype).reshape(-1, *x.shape)
            for part, x in zip(parts, leaves, strict=True)
        ],
    )
