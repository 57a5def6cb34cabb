"""Clipping by the global norm, in few kernels.

    norm(g)  = sqrt(sum over all arrays and elements of g^2)
    clip(g)  = g * min(1, c / norm(g))

as `optax.clip_by_global_norm` (Pascanu et al., arXiv 1211.5063, section 3.2), but for
the order of the sum: optax finishes the sum of each array by a kernel of its own, which
takes a GPU 2 us. Here it is the norm of one vector, of the elements of small arrays and
the norms of the rows of others, which are taken where gradients are written.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

_SMALL = 2**17  # elements, which are copied in less time than a kernel takes to start


def global_norm(tree: Any) -> Float[Array, ""]:
    """Returns the square root of the sum of the squares of all elements, in float32."""
    parts = [_norms(x.astype(jnp.float32)) for x in jax.tree.leaves(tree)]
    if not parts:
        return jnp.zeros((), jnp.float32)
    # XLA would turn the sum of what is joined into the sums of its parts.
    return jnp.linalg.norm(jax.lax.optimization_barrier(jnp.concatenate(parts)))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Returns a transformation that scales gradients down to a norm.

    Args:
        max_norm: gradients of a smaller norm stay as they are.
    """

    def clip(updates: Any, state: optax.OptState, params: Any = None):
        del params
        norm = global_norm(updates)
        scale = jnp.where(norm < max_norm, 1.0, max_norm / norm)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), clip)


def _norms(x: Array) -> Float[Array, " n"]:
    """Returns the elements of a small array, the norms of the rows of others."""
    is_small = x.ndim < 2 or x.size <= _SMALL
    return x.ravel() if is_small else jnp.linalg.norm(x, axis=-1).ravel()
