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

from collections.abc import Collection

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from loka_jax import fp8, quality
from loka_jax.dispatch.policy import DEFAULT_LIMITS, Limits, bounds
from loka_jax.fp8 import Fp8Array
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.ops.tailed_products import unit_of_fp8
from loka_jax.probe.live_errors import Operands, blocks, quantized
from loka_jax.recipe import OPERANDS, ROLE_OPERANDS, ROLES, Recipe, Role
from loka_jax.site import Choice, SiteSpec

_ROWS = 256  # of a product in FP8 that are computed


def health(
    operands: Operands,
    errors: Float[Array, "3"],
    recipe: Recipe,
    *,
    fp8_results: Collection[Role] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> Float[Array, "3 4"]:
    """Returns the measures in `drift.RULES` of fwd, dlhs, drhs and of lhs, rhs, g.

    NaN for products and operands without a cast, and for the size of zeros.

    Args:
        operands: some rows of those of a step.
        errors: relative L2 of the products by role.
        recipe: of the site.
        fp8_results: roles whose products leave in FP8 without a scale of their own if
            they run in FP8, see `Site.fp8_results`: the error has what saturates
            there, too.
        limits: on errors.
    """
    (m, k), n = operands.lhs.shape, operands.rhs.shape[1]
    site = resolve(SiteSpec(m=m, k=k, n=n), Choice("xla", recipe), local_device())
    recipe = site.recipe  # without what cannot run in FP8
    largest, nothing = bounds(limits)["relative_l2"], jnp.full((), jnp.nan, jnp.float32)
    excess, flushed = [], {name: [] for name in OPERANDS}
    for role, error in zip(ROLES, errors, strict=True):
        if recipe.gemm(role) is None:
            excess.append(nothing)
            continue
        arrays = blocks(operands, role)
        views = quantized(operands, role, recipe, *arrays)
        for name, x, view in zip(ROLE_OPERANDS[role], arrays, views, strict=True):
            flushed[name].append(_flushed(x, view.dequantize()))
        if role in fp8_results:
            error = jnp.hypot(error, _rounding(role, *views))
        excess.append(jnp.log2(jnp.maximum(error / largest, 1.0)))
    rows = []
    for name, error in zip(OPERANDS, excess, strict=True):
        roots = jnp.mean(jnp.sqrt(jnp.abs(getattr(operands, name))), axis=0)
        level, peak = (2 * jnp.log2(size) for size in (jnp.mean(roots), jnp.max(roots)))
        lost = jnp.max(jnp.stack(flushed[name])) if flushed[name] else nothing
        sizes = (level, peak) if flushed[name] else (nothing, nothing)
        rows.append(jnp.stack([error, lost, *sizes]))
    measures = jnp.stack(rows)
    return jnp.where(jnp.isfinite(measures), measures, jnp.nan)


def _rounding(role: Role, first: Fp8Array, second: Fp8Array) -> Float[Array, ""]:
    """Returns the relative L2 error of a product that leaves in the first's format."""
    rows, k = first.data[:_ROWS].astype(jnp.float32), first.data.shape[1]
    product = jnp.dot(
        rows, second.data.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST
    )
    scaled = product / unit_of_fp8(role, k)
    return quality.relative_l2(scaled, fp8.saturate(scaled, first.data.dtype))


def _flushed(x: Float[Array, "r c"], left: Float[Array, "r c"]) -> Float[Array, ""]:
    """Returns what a cast that makes `left` of an operand loses to zeros."""
    sizes = jnp.abs(x)
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
