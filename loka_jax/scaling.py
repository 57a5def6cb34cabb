"""Scales of the operands of a site: from this step's amax, or from a history.

Current scaling needs no state. Delayed scaling keeps, for the three operands of a site
(lhs, rhs, g, in this order), a short window of amaxes and the scale they give:

    scale_inv = compute_scale_inv(max over the window)

One small state per site, updated once a step, so that the update is one kernel. The
state is not a parameter: it is never clipped, decayed, averaged or optimized. Over
microbatches and over mesh axes it is merged by the maximum.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.recipe import OPERANDS, Cast, Operand, Recipe


@struct.dataclass
class DelayedScaling:
    """The delayed-scaling state of one site.

    Attributes:
        scale_inv: float32 `[3]`, the factors the next step casts with; 0 before the
            first amax was seen.
        amax_history: float32 `[3, H]`, newest first; 0 where nothing was seen yet.
    """

    scale_inv: Float[Array, "3"]
    amax_history: Float[Array, "3 H"]


def init_delayed(recipe: Recipe) -> DelayedScaling:
    """Returns the state of a site that has seen nothing yet."""
    count = len(OPERANDS)
    return DelayedScaling(
        jnp.zeros((count,), jnp.float32),
        jnp.zeros((count, recipe.amax_history_length), jnp.float32),
    )


def update_delayed(
    state: DelayedScaling, amaxes: Float[Array, "3"], recipe: Recipe
) -> DelayedScaling:
    """Returns the state after a step in which the operands had these amaxes.

    A non-finite amax never enters the history: that operand's row stays as it was, for
    one such value would hold the scale for the whole window.
    """
    shifted = jnp.concatenate([amaxes[:, None], state.amax_history[:, :-1]], axis=1)
    is_finite = jnp.isfinite(amaxes)[:, None]
    history = jnp.where(is_finite, shifted, state.amax_history)
    largest = jnp.max(history, axis=1)
    scales = [_scale_inv_of(o, largest[i], recipe) for i, o in enumerate(OPERANDS)]
    return DelayedScaling(jnp.stack(scales), history)


def delayed_scale_inv(
    state: DelayedScaling,
    operand: Operand,
    amax: Float[Array, ""],
    cast: Cast,
    recipe: Recipe,
) -> Float[Array, ""]:
    """Returns the factor to cast `operand` with in this step.

    The state's, if it has one. Before the first amax was seen it is the current one, so
    that a first step neither clips nor flushes. That guard makes the cast wait for this
    step's amax; `recipe.is_calibrated` promises that it is not needed and drops it (an
    operand that was all zero until now is then cast unscaled for one step).
    """
    stored = state.scale_inv[OPERANDS.index(operand)]
    if recipe.is_calibrated:
        return jnp.where(stored > 0, stored, 1.0)
    current = fp8.compute_scale_inv(amax, cast.dtype, pow2_scale=cast.pow2_scale)
    return jnp.where(stored > 0, stored, current)


def merge_delayed(a: DelayedScaling, b: DelayedScaling) -> DelayedScaling:
    """Returns the state after two microbatches that started from the same one.

    The element-wise maximum: both shifted the same history and put their amax in
    front, and a scale grows with its amax.
    """
    return jax.tree.map(jnp.maximum, a, b)


def is_calibrated(state: DelayedScaling) -> Array:
    """Returns True if every operand has a scale from an amax that was seen."""
    return jnp.all(state.scale_inv > 0)


def _scale_inv_of(operand: Operand, amax, recipe: Recipe):
    casts = [cast for cast in recipe.casts(operand) if cast.scaling == "delayed"]
    if not casts:
        return jnp.ones((), jnp.float32)
    scale_inv = fp8.compute_scale_inv(
        amax, casts[0].dtype, pow2_scale=casts[0].pow2_scale, margin=recipe.margin
    )
    # An operand that was all zero so far has taught nothing: it stays uncalibrated.
    return jnp.where(amax > 0, scale_inv, 0.0)
