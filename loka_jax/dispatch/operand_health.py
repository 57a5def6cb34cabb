"""What the casts of a recipe do to the operands of a site, and how large these are.

For an operand `[rows, columns]` under every cast that the recipe gives it:

    clipped   the worst column's share of elements that saturate
    flushed   the share of its magnitude that a row, or a column, loses to zeros:
              the mean over rows or over columns, whichever is larger
    level     log2 of the size of its elements
    peak      log2 of the size of its largest column

A size is `(mean sqrt|x|)^2`, which a few outliers hardly move. Rows and columns count
alike, however small they are: beside one loud column a whole array loses next to
nothing, and all other columns everything.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from loka_jax import fp8
from loka_jax.fp8 import Fp8Array
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.ops.products import Products, with_copy
from loka_jax.probe.capture import Sample
from loka_jax.recipe import OPERANDS, ROLE_OPERANDS, ROLES, Operand, Recipe
from loka_jax.scaling import DelayedScaling, delayed_scale_inv
from loka_jax.site import Choice, SiteSpec

# Rounding to the largest number of E5M2 takes off at most 7 %; more was clipped.
_CLIPPED = 1.1


class Health(NamedTuple):
    """What the casts do to operands, and how large these are.

    Attributes:
        clipped: share of the elements of the worst column that saturate.
        flushed: mean share of their magnitude that rows, or columns, lose to zeros.
        level: log2 of the size of the elements; NaN if all are zero.
        peak: log2 of the size of the largest column.
    """

    clipped: Float[Array, "*operands"]
    flushed: Float[Array, "*operands"]
    level: Float[Array, "*operands"]
    peak: Float[Array, "*operands"]


def health(sample: Sample, recipe: Recipe, state: DelayedScaling | None) -> Health:
    """Returns the health of lhs, rhs and g, `[3]`; NaN for those without a cast.

    Args:
        sample: of the operands of a step.
        recipe: of the site.
        state: delayed-scaling state before the step if the recipe is delayed.
    """
    (m, k), n = sample.operands.lhs.shape, sample.operands.rhs.shape[1]
    site = resolve(SiteSpec(m=m, k=k, n=n), Choice("xla", recipe), local_device())
    products = Products.of(site)
    operands = [
        _of_operand(products, name, x, sample.amaxes[i], state)
        for i, (name, x) in enumerate(zip(OPERANDS, sample.operands, strict=True))
    ]
    return jax.tree.map(lambda *x: jnp.stack(x), *operands)


def _of_operand(
    products: Products, name: Operand, x: Array, amax: Array, state
) -> Health:
    casts = _casts(products, name, x, amax, state)
    if not casts:
        return Health(*[jnp.full((), jnp.nan, jnp.float32)] * 4)
    damages = [_damage(x, data, left) for data, left in casts]
    clipped, flushed = (jnp.max(jnp.stack(d)) for d in zip(*damages, strict=True))
    roots = jnp.mean(jnp.sqrt(jnp.abs(x)), axis=0)
    level, peak = (2 * jnp.log2(size) for size in (jnp.mean(roots), jnp.max(roots)))
    values = Health(clipped, flushed, level, peak)
    return jax.tree.map(lambda v: jnp.where(jnp.isfinite(v), v, jnp.nan), values)


def _casts(
    products: Products, name: Operand, x: Array, amax: Array, state
) -> list[tuple[Array, Array]]:
    """Returns FP8 data, and what they stand for, as each role in FP8 reads them."""
    found = []
    for role in ROLES:
        cast = products.cast(role, name) if name in ROLE_OPERANDS[role] else None
        if cast is None:
            continue
        if cast.scaling == "delayed":
            scale_inv = delayed_scale_inv(state, name, amax, cast, products.recipe)
        else:
            scale_inv = fp8.compute_scale_inv(
                amax, cast.dtype, pow2_scale=cast.pow2_scale
            )
        operand = with_copy(x, fp8.cast(x, scale_inv, cast.dtype), amax[None])
        view = products.view(role, name, operand)
        assert isinstance(view, Fp8Array)
        forms = view.data, view.dequantize()
        is_transposed = role == "drhs" or (role, name) == ("fwd", "rhs")
        found.append(tuple(form.T for form in forms) if is_transposed else forms)
    return found


def _damage(x: Array, data: Array, left: Array) -> tuple[Array, Array]:
    """Returns `Health.clipped` and `Health.flushed` of one cast.

    Args:
        x: an operand.
        data: its FP8 form.
        left: what that stands for.
    """
    sizes, left = jnp.abs(x), jnp.abs(left)
    is_largest = jnp.abs(data.astype(jnp.float32)) == fp8.fp8_max(data.dtype)
    clipped = jnp.mean(is_largest & (sizes > _CLIPPED * left), axis=0)
    is_flushed = (sizes > 0) & (left == 0)
    lost = [_mean_lost(sizes, is_flushed, axis) for axis in (0, 1)]
    return jnp.max(clipped), jnp.maximum(*lost)


def _mean_lost(
    sizes: Float[Array, "r c"], is_flushed: Bool[Array, "r c"], axis: int
) -> Float[Array, ""]:
    """Returns the share of its magnitude that a slice loses, the mean of slices."""
    totals = jnp.sum(sizes, axis)
    lost = jnp.sum(jnp.where(is_flushed, sizes, 0.0), axis)
    shares = lost / jnp.where(totals > 0, totals, 1.0)
    count = jnp.sum(totals > 0, dtype=jnp.float32)
    return jnp.sum(shares) / jnp.maximum(count, 1)
