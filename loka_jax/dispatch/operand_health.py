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

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from loka_jax import fp8, quality
from loka_jax.dispatch.policy import DEFAULT_LIMITS, Limits, bounds
from loka_jax.fp8 import Fp8Array
from loka_jax.ops.device import local_device
from loka_jax.ops.group_sites import unit_of_fp8
from loka_jax.ops.plan import resolve
from loka_jax.probe.capture import Sample
from loka_jax.probe.live_errors import quantized
from loka_jax.recipe import (
    OPERANDS,
    ROLE_OPERANDS,
    ROLES,
    Cast,
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
    (m, k), n = sample.lhs.shape, sample.rhs.shape[1]
    site = resolve(SiteSpec(m=m, k=k, n=n), Choice("xla", recipe), local_device())
    recipe = site.recipe  # without what cannot run in FP8
    nothing = jnp.full((), jnp.nan, jnp.float32)
    largest = bounds(limits)["relative_l2"]
    excess, after_casts = [], {name: [] for name in OPERANDS}
    for role, error in zip(ROLES, errors, strict=True):
        views = _views(sample, role, recipe, state)
        if not views:
            excess.append(nothing)
            continue
        for name, view in views.items():
            left = view.dequantize()
            after_casts[name].append(left.T if _is_transposed(role, name) else left)
        if role in fp8_results:
            error = jnp.hypot(error, _rounding(role, *views.values()))
        excess.append(jnp.log2(jnp.maximum(error / largest, 1.0)))
    measures = [
        _of_operand(getattr(sample, name), after_casts[name]) for name in OPERANDS
    ]
    flushed, level, peak = (jnp.stack(x) for x in zip(*measures, strict=True))
    result = Health(jnp.stack(excess), flushed, level, peak)
    return jax.tree.map(lambda v: jnp.where(jnp.isfinite(v), v, jnp.nan), result)


def _views(
    sample: Sample, role: Role, recipe: Recipe, state: DelayedScaling | None
) -> dict[Operand, Fp8Array]:
    """Returns a role's operands as it multiplies them; none if not in FP8."""
    gemm = recipe.gemm(role)
    if gemm is None:
        return {}
    views: dict[Operand, Fp8Array] = {}
    for name, cast in zip(ROLE_OPERANDS[role], (gemm.first, gemm.second), strict=True):
        x, scale_inv = getattr(sample, name), None
        if cast.granularity == "tensorwise":
            amax = sample.amaxes[OPERANDS.index(name)]
            scale_inv = _scale_inv(name, amax, cast, recipe, state)
        x = x.T if _is_transposed(role, name) else x
        views[name] = quantized(cast, name, scale_inv, x)
    return views


def _is_transposed(role: Role, name: Operand) -> bool:
    return role == "drhs" or (role, name) == ("fwd", "rhs")


def _scale_inv(name: Operand, amax: Array, cast: Cast, recipe: Recipe, state) -> Array:
    """Returns the factor that a whole operand is cast with."""
    if cast.scaling == "delayed":
        return delayed_scale_inv(state, name, amax, cast, recipe)
    return fp8.compute_scale_inv(amax, cast.dtype, pow2_scale=cast.pow2_scale)


def _rounding(role: Role, first: Fp8Array, second: Fp8Array) -> Float[Array, ""]:
    """Returns the relative L2 error of a product that leaves in the first's format."""
    rows, k = first.data[:_ROWS].astype(jnp.float32), first.data.shape[1]
    product = jnp.dot(
        rows, second.data.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST
    )
    scaled = product / unit_of_fp8(role, k)
    return quality.relative_l2(scaled, fp8.saturate(scaled, first.data.dtype))


def _of_operand(
    x: Float[Array, "r c"], after_casts: Sequence[Float[Array, "r c"]]
) -> tuple[Array, Array, Array]:
    """Returns `Health.flushed`, `level` and `peak` of an operand."""
    if not after_casts:
        nothing = jnp.full((), jnp.nan, jnp.float32)
        return nothing, nothing, nothing
    flushed = jnp.stack([_flushed(x, left) for left in after_casts])
    roots = jnp.mean(jnp.sqrt(jnp.abs(x)), axis=0)
    level, peak = (2 * jnp.log2(size) for size in (jnp.mean(roots), jnp.max(roots)))
    return jnp.max(flushed), level, peak


def _flushed(x: Float[Array, "r c"], left: Float[Array, "r c"]) -> Float[Array, ""]:
    """Returns `Health.flushed` of a cast that makes `left` of an operand."""
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
