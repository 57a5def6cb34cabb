"""An einsum of activations and a weight as a site."""

from typing import Any

import jax
from jaxtyping import Array, Float
from opt_einsum import parser

from loka_jax.nn.dense import product


def einsum(
    module: Any,
    equation: str,
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    **attributes: Any,
) -> Float[Array, "..."]:
    """Returns `jax.numpy.einsum` of two operands, as a product that is a site.

    Raises:
        ValueError: if the equation is more than a product, such as one that sums over
            a dim of one operand alone.
    """
    operands, result, _ = parser.parse_einsum_input((equation, lhs, rhs))
    left, right = operands.split(",")
    shared = [c for c in left if c in right]
    batch = [c for c in shared if c in result]
    kept = [*batch, *(c for c in left + right if c not in shared)]
    if sorted(kept) != sorted(result) or len(set(left)) < len(left):
        path = "/".join(module.path)
        raise ValueError(
            f"Einsum {path!r} with {equation!r} is more than a product: skip it, "
            f"nn.convert(..., skip={path!r})."
        )
    summed = [c for c in shared if c not in batch]
    dims = _places(summed, left, right), _places(batch, left, right)
    out = product(
        module, lhs, rhs, dims, precision, preferred_element_type, **attributes
    )
    return out.transpose([kept.index(c) for c in result])


def _places(letters, left: str, right: str) -> tuple[list[int], list[int]]:
    return [left.index(c) for c in letters], [right.index(c) for c in letters]
