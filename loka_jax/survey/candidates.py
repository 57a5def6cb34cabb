"""What can run a role of a site: providers and recipes.

A role is measured once for each way to cast its operands: recipes that differ
elsewhere only count as one, under the first one's name.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import scaling
from loka_jax.dispatch.candidates import SiteKey
from loka_jax.nn import Site
from loka_jax.ops import roles
from loka_jax.ops.dense_norm import dense_norm, plan
from loka_jax.ops.products import decide
from loka_jax.recipe import Recipe, Role, get_recipe
from loka_jax.site import Choice

BF16 = "xla bf16"


def product(
    choice: Choice, role: Role, first: Array, second: Array, amaxes: Float[Array, "3"]
) -> Array:
    """Returns a role's product.

    Args:
        choice: who runs it, and how.
        role: which.
        first, second: its operands, see `ops.roles`.
        amaxes: of lhs, rhs and g, which delayed scales are made for.
    """
    state = scaling_state(choice.recipe, amaxes)
    if choice.provider == "xla":
        return roles.product(role, first, second, choice.recipe, state)
    out = dense_norm(
        first,
        second,
        norm="none",
        recipe=choice.recipe,
        state=state,
        implementation="pallas",
    )
    assert isinstance(out, jax.Array)
    return out


def rates(
    recipe: Recipe, role: Role, first: Array, second: Array, amaxes: Float[Array, "3"]
) -> roles.CastRates:
    """Returns what a role's casts flush and clip."""
    state = scaling_state(recipe, amaxes)
    return roles.cast_rates(role, first, second, recipe, state)


def scaling_state(
    recipe: Recipe, amaxes: Float[Array, "3"]
) -> scaling.DelayedScaling | None:
    """Returns the scaling state of a site that has seen these amaxes."""
    if not recipe.is_delayed:
        return None
    empty = scaling.init_delayed(recipe)
    return scaling.update_delayed(empty, amaxes, recipe)


def candidates(
    site: Site | SiteKey, role: Role, recipes: tuple[str, ...]
) -> list[Choice]:
    """Returns what can run a role here, bfloat16 first."""
    found = [Choice("xla", get_recipe("bf16"))]
    seen = set()
    for recipe in map(get_recipe, recipes):
        gemm = decide(recipe, role, site.m, site.k, site.n).gemm
        if gemm is None or gemm in seen:
            continue
        seen.add(gemm)
        found.append(Choice("xla", recipe))
        if role == "fwd" and _is_fused(site, recipe):
            found.append(Choice("pallas", recipe))
    return found


def _is_fused(site: Site | SiteKey, recipe: Recipe) -> bool:
    # As in `product`, which leaves out what XLA and kernels do alike.
    chosen = plan(recipe, site.m, site.k, site.n, norm="none", activation="none")
    return chosen.forward == "fused"


def operand_amaxes(
    role: Role, first: Float[Array, "..."], second: Float[Array, "..."]
) -> Float[Array, "3"]:
    """Returns the amaxes of lhs, rhs and g; 1 for the one that the role lacks."""
    a, b = (jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (first, second))
    one = jnp.ones((), jnp.float32)
    return jnp.stack(
        {"fwd": (a, b, one), "dlhs": (one, b, a), "drhs": (a, one, b)}[role]
    )
