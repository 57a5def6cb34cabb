"""One role of a site by itself, from float32 operands, to measure candidates.

fwd    lhs (m, k), rhs (k, n)    ->  lhs @ rhs
dlhs   g (m, n),   rhs (k, n)    ->  g @ rhs^T
drhs   lhs (m, k), g (m, n)      ->  lhs^T @ g
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import quality
from loka_jax.fp8 import Fp8Array
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.ops.products import Products, SiteOperand
from loka_jax.recipe import ROLE_OPERANDS, Recipe, Role
from loka_jax.scaling import DelayedScaling
from loka_jax.site import Choice, SiteSpec
from loka_jax.xla import high_precision_matmul


class CastRates(NamedTuple):
    """The damage of a role's casts to the worse operand, as shares of elements.

    Attributes:
        saturation: elements at the largest magnitude of their format.
    """

    underflow: Float[Array, ""]
    saturation: Float[Array, ""]


def sizes(role: Role, first: Array, second: Array) -> tuple[int, int, int]:
    """Returns (m, k, n) of the site whose role has these operands."""
    if role == "dlhs":
        return first.shape[0], second.shape[0], first.shape[1]
    return first.shape[0], first.shape[1], second.shape[1]


def product(
    role: Role,
    first: Float[Array, "..."],
    second: Float[Array, "..."],
    recipe: Recipe,
    state: DelayedScaling | None = None,
) -> Float[Array, "..."]:
    """Returns a role's product by XLA in the recipe's precision.

    The result has the compute dtype; drhs, the gradient of a master weight, float32.
    """
    products, operands = _read(role, first, second, recipe, state)
    out_dtype = jnp.float32 if role == "drhs" else recipe.compute_dtype
    return products.multiply(role, *operands, out_dtype=out_dtype)


def exact_product(
    role: Role, first: Float[Array, "..."], second: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Returns a role's product in float32."""
    a, b = {
        "fwd": lambda: (first, second.T),
        "dlhs": lambda: (first, second),
        "drhs": lambda: (first.T, second.T),
    }[role]()
    return high_precision_matmul(a, b, compute_dtype=jnp.float32, out_dtype=jnp.float32)


def cast_rates(
    role: Role,
    first: Float[Array, "..."],
    second: Float[Array, "..."],
    recipe: Recipe,
    state: DelayedScaling | None = None,
) -> CastRates:
    """Returns the damage of a role's casts; zeros if it has none."""
    products, operands = _read(role, first, second, recipe, state)
    underflow = saturation = jnp.zeros((), jnp.float32)
    for name, operand in zip(ROLE_OPERANDS[role], operands, strict=True):
        cast = products.view(role, name, operand)
        if isinstance(cast, Fp8Array):
            assert operand.value is not None
            # Counts, since the cast may be transposed.
            nonzero = _count_nonzero(operand.value)
            flushed = nonzero - _count_nonzero(cast.data)
            underflow = jnp.maximum(underflow, flushed / jnp.maximum(nonzero, 1))
            rate = quality.saturation_rate(cast.data)
            rate *= cast.data.size / operand.value.size  # of which some are padding
            saturation = jnp.maximum(saturation, rate)
    return CastRates(underflow, saturation)


def _count_nonzero(x: Array) -> Float[Array, ""]:
    return jnp.sum(x.astype(jnp.float32) != 0, dtype=jnp.float32)


def _read(
    role: Role, first: Array, second: Array, recipe: Recipe, state
) -> tuple[Products, tuple[SiteOperand, SiteOperand]]:
    m, k, n = sizes(role, first, second)
    spec = SiteSpec(m=m, k=k, n=n)
    products = Products.of(resolve(spec, Choice("xla", recipe), local_device()))
    names = ROLE_OPERANDS[role]
    a, b = (
        products.read(name, x, state, roles=(role,))
        for name, x in zip(names, (first, second), strict=True)
    )
    return products, (a, b)
