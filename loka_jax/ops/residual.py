"""Embeddings on their way around a layer, whose gradient comes back in parts.

    y = norm([part_1; ...; part_p] + X)

In backward the gradient of X is that of the parts, one below the other. A kernel that
makes another gradient of X reads the parts and adds them to it, so that neither their
concatenation nor a sum goes through memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Residual(NamedTuple):
    """X beside the parts of a layer, for `joined_norm`.

    Attributes:
        x: its values, which have no gradient.
        rows: X cut as the parts are. `joined_norm` reads none of their values, and
            gives them the gradient of X.
    """

    x: Float[Array, "B n d"]
    rows: tuple[Float[Array, "B _ d"], ...]


def cut(
    x: Float[Array, "B n d"], counts: tuple[int, ...]
) -> tuple[Float[Array, "B _ d"], ...]:
    """Returns the embeddings of x in groups of these sizes; none without sizes."""
    if not counts:
        return ()
    ends = [sum(counts[: i + 1]) for i in range(len(counts) - 1)]
    return tuple(jnp.split(x, ends, axis=1))


def beside(x: Float[Array, "B n d"], rows: tuple[Array, ...]) -> Residual:
    """Returns the residual of x, whose gradient is that of `rows`."""
    return Residual(jax.lax.stop_gradient(x), rows)
