"""The operands of a site in one step, and float32 products of some of them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.recipe import OPERANDS, Role

_ROWS, _COLUMNS = 256, 64  # of a product that are computed
_SLICE = 512  # rows that a float32 product sums one after another


class Operands(NamedTuple):
    """The operands of a site, or some of their rows, and how far all rows reach.

    Attributes:
        lhs, rhs, g: the operands, g the gradient of the product.
        amaxes: of lhs, rhs and g, over all rows and devices.
        scales: `scale_inv` of their delayed casts; 0 where their amaxes give it.
    """

    lhs: Float[Array, "m k"]
    rhs: Float[Array, "k n"]
    g: Float[Array, "m n"]
    amaxes: Float[Array, "3"]
    scales: Float[Array, "3"]


def operands_of(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "k n"],
    g: Float[Array, "m n"],
    scales: Sequence[Float[Array, ""] | None] = (None,) * len(OPERANDS),
    axis_names: tuple[str, ...] = (),
) -> Operands:
    """Returns operands of a step, whose rows are spread over some mesh axes.

    `scales` are those that they are cast with; None, or 0, where the amax gives them.
    """
    arrays = jax.lax.stop_gradient((lhs, rhs, g))
    amaxes = fp8.amax_over_devices(jnp.stack([*map(fp8.amax, arrays)]), axis_names)
    stored = [jnp.zeros(()) if scale is None else scale for scale in scales]
    return Operands(*arrays, amaxes, jnp.stack(stored))


def blocks(
    operands: Operands, role: Role, shift: Float[Array, ""] | None = None
) -> tuple[Array, Array]:
    """Returns the operands of a role, contracting their last dim.

    With a share at which a step begins, only the rows that are multiplied.
    """
    lhs, rhs, g, *_ = operands
    if role == "drhs":
        return some(lhs, _COLUMNS, shift, axis=1).T, some(g, _COLUMNS, shift, 1).T
    first, second = (g, rhs) if role == "dlhs" else (lhs, rhs.T)
    return some(first, _ROWS, shift, axis=0), second


def some(x: Array, limit: int, shift: Float[Array, ""] | None, axis: int) -> Array:
    """Returns up to `limit` rows or columns, spread evenly, the first at a share.

    Every one of them is returned at some share, whatever their number.
    """
    size = x.shape[axis]
    if size <= limit or shift is None:
        return x
    places = jnp.floor((jnp.arange(limit, dtype=jnp.float32) + shift) * (size / limit))
    return jnp.take(x, jnp.minimum(places.astype(jnp.int32), size - 1), axis=axis)


def products_of_parts(
    first: Float[Array, "r m"], second: Float[Array, "c m"], parts: int
) -> Float[Array, "p r c"]:
    """Returns the float32 products of parts of the rows, each from all over them.

    Slices of a part are multiplied side by side: a GPU has few tiles in so small a
    product, and would sum its many rows one after another.
    """
    rows = first.shape[1]
    slices = max(rows // (parts * _SLICE), 1)
    missing = -rows % (slices * parts)
    shape = slices, (rows + missing) // (slices * parts), parts
    first, second = (
        jnp.pad(x.astype(jnp.float32), ((0, 0), (0, missing))).reshape(len(x), *shape)
        for x in (first, second)
    )
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("ismp,jsmp->spij", first, second, precision=highest).sum(axis=0)
