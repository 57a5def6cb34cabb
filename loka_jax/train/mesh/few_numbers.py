"""A few numbers of each device, brought to all of them.

Within a sum of float32 that is made anyway, or by one of their own: a launch of a
collective takes the host longer than GPUs take for the numbers. A sum keeps their bits,
as each device adds zeros to the numbers of the others, and float32 has all whole
numbers of 16 bits.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from loka_jax.train.mesh.devices import AXES


def gathered(tree: Any) -> Any:
    """Returns what all devices have, along a new axis 0, by a sum of its own.

    Args:
        tree: of arrays of 32-bit numbers.
    """
    return from_sum(jax.lax.psum(to_sum(tree), AXES), tree)


def to_sum(tree: Any) -> Float[Array, "L K"]:
    """Returns what to add up over all L devices, for `from_sum`.

    Args:
        tree: of arrays of 32-bit numbers.
    """
    leaves = jax.tree.leaves(tree)
    words = jnp.concatenate(
        [jax.lax.bitcast_convert_type(x, jnp.uint32).ravel() for x in leaves]
    )
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
