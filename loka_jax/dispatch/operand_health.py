"""What the casts of a recipe do to a site's products and operands, and their sizes.

For a product under the casts of its role, with the scales of the step:

    error     how far its relative L2 error is above its limit (`policy.Limits`), as
              log2 of the ratio; 0 within the limit

For an operand `[rows, columns]` under every cast that the recipe gives it:

    flushed   the share of its magnitude that a row, or a column, loses to zeros:
              the mean over rows or over columns, whichever is larger
    level     log2 of the size of its elements
    peak      log2 of the size of its largest column

A size is `(mean sqrt|x|)^2`, which a few outliers hardly move. Errors hide what is
small: beside one loud column a product loses next to nothing, and all other columns
everything. So rows and columns that are lost count alike, however small they are.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from loka_jax import fp8, quality
from loka_jax.dispatch.policy import DEFAULT_LIMITS, Limits, bounds
from loka_jax.fp8 import Fp8Array
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.ops.products import Products, with_copy
from loka_jax.ops.tailed_products import unit_of_fp8
from loka_jax.probe.capture import Sample
from loka_jax.recipe import (
    OPERANDS,
    ROLE_OPERANDS,
    ROLES,
    GemmRecipe,
    Operand,
    Recipe,
    Role,
)
from loka_jax.scaling import DelayedScaling, delayed_scale_inv
from loka_jax.site import Choice, SiteSpec

_ROWS = 256  # of a product in FP8 that are computed


class Health(NamedTuple):
    """What the casts do to the products and operands of a site, and their sizes.

    Attributes:
        error: log2 of how many times its limit a product's error is; 0 within it.
        flushed: mean share of their magnitude that rows, or columns, lose to zeros.
        level: log2 of the size of the elements; NaN if all are zero.
        peak: log2 of the size of the largest column.
    """

    error: Float[Array, "*roles"]
    flushed: Float[Array, "*operands"]
    level: Float[Array, "*operands"]
    peak: Float[Array, "*operands"]


# By role and operand, in FP8 as the role reads it: it contracts the last dim.
type _Views = Mapping[tuple[Role, Operand], Fp8Array]


def health(
    sample: Sample,
    errors: Float[Array, "3"],
    recipe: Recipe,
    state: DelayedScaling | None,
    *,
    fp8_results: Collection[Role] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> Health:
    """Returns the health of fwd, dlhs, drhs and of lhs, rhs, g: `[3]` each.

    NaN for products and operands without a cast.

    Args:
        sample: of the operands of a step.
        errors: relative L2 of the products by role.
        recipe: of the site.
        state: delayed-scaling state before the step if the recipe is delayed.
        fp8_results: roles whose products leave in FP8 without a scale of their own if
            they run in FP8, see `Site.fp8_results`: the error has what saturates
            there, too.
        limits: on errors.
    """
    (m, k), n = sample.operands.lhs.shape, sample.operands.rhs.shape[1]
    site = resolve(SiteSpec(m=m, k=k, n=n), Choice("xla", recipe), local_device())
    products = Products.of(site)
    views = _views(products, sample, state)
    for role in fp8_results:
        if products.recipe.gemm(role) is None:
            continue  # its product leaves in high precision
        first, second = (views[role, name] for name in ROLE_OPERANDS[role])
        place = ROLES.index(role)
        error = jnp.hypot(errors[place], _rounding(role, first, second))
        errors = errors.at[place].set(error)
    excess = [
        _excess(error, products.recipe.gemm(role), limits)
        for error, role in zip(errors, ROLES, strict=True)
    ]
    operands = [
        _of_operand(name, x, views)
        for name, x in zip(OPERANDS, sample.operands, strict=True)
    ]
    flushed, level, peak = (jnp.stack(x) for x in zip(*operands, strict=True))
    result = Health(jnp.stack(excess), flushed, level, peak)
    return jax.tree.map(lambda v: jnp.where(jnp.isfinite(v), v, jnp.nan), result)


def _views(products: Products, sample: Sample, state) -> _Views:
    """Returns the operands in FP8 as each role in FP8 reads them."""
    views = {}
    for role in ROLES:
        for name in ROLE_OPERANDS[role]:
            cast = products.cast(role, name)
            if cast is None:
                continue
            i = OPERANDS.index(name)
            x, amax = sample.operands[i], sample.amaxes[i]
            if cast.scaling == "delayed":
                scale_inv = delayed_scale_inv(state, name, amax, cast, products.recipe)
            else:
                scale_inv = fp8.compute_scale_inv(
                    amax, cast.dtype, pow2_scale=cast.pow2_scale
                )
            copy = fp8.cast(x, scale_inv, cast.dtype)
            view = products.view(role, name, with_copy(x, copy, amax[None]))
            assert isinstance(view, Fp8Array)
            views[role, name] = view
    return views


def _excess(error: Array, gemm: GemmRecipe | None, limits: Limits) -> Array:
    """Returns `Health.error` of a product."""
    if gemm is None:
        return jnp.full((), jnp.nan, jnp.float32)
    return jnp.log2(jnp.maximum(error / bounds(limits)["relative_l2"], 1.0))


def _rounding(role: Role, first: Fp8Array, second: Fp8Array) -> Float[Array, ""]:
    """Returns the relative L2 error of a product that leaves in the first's format."""
    rows, k = first.data[:_ROWS].astype(jnp.float32), first.data.shape[1]
    product = jnp.dot(
        rows, second.data.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST
    )
    scaled = product / unit_of_fp8(role, k)
    return quality.relative_l2(scaled, fp8.saturate(scaled, first.data.dtype))


def _of_operand(name: Operand, x: Array, views: _Views) -> tuple[Array, Array, Array]:
    """Returns `Health.flushed`, `level` and `peak` of an operand."""
    flushed = [
        _flushed(x, view, is_transposed=_is_transposed(role, name))
        for (role, operand), view in views.items()
        if operand == name
    ]
    if not flushed:
        nothing = jnp.full((), jnp.nan, jnp.float32)
        return nothing, nothing, nothing
    roots = jnp.mean(jnp.sqrt(jnp.abs(x)), axis=0)
    level, peak = (2 * jnp.log2(size) for size in (jnp.mean(roots), jnp.max(roots)))
    return jnp.max(jnp.stack(flushed)), level, peak


def _is_transposed(role: Role, name: Operand) -> bool:
    return role == "drhs" or (role, name) == ("fwd", "rhs")


def _flushed(x: Array, view: Fp8Array, *, is_transposed: bool) -> Float[Array, ""]:
    """Returns `Health.flushed` of one cast of an operand."""
    left = view.dequantize()
    sizes, left = jnp.abs(x), left.T if is_transposed else left
    is_flushed = (sizes > 0) & (left == 0)
    return jnp.maximum(*(_mean_lost(sizes, is_flushed, axis) for axis in (0, 1)))


def _mean_lost(
    sizes: Float[Array, "r c"], is_flushed: Bool[Array, "r c"], axis: int
) -> Float[Array, ""]:
    """Returns the share of its magnitude that a slice loses, the mean of slices."""
    totals = jnp.sum(sizes, axis)
    lost = jnp.sum(jnp.where(is_flushed, sizes, 0.0), axis)
    shares = lost / jnp.where(totals > 0, totals, 1.0)
    count = jnp.sum(totals > 0, dtype=jnp.float32)
    return jnp.sum(shares) / jnp.maximum(count, 1)
