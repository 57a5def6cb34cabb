"""Scales of the operands of a site: from this step's amax, or from a history.

Current scaling needs no state. Delayed scaling keeps, for the three operands of a site
(lhs, rhs, g, in this order), a short window of amaxes and the scale they give:

    scale_inv = compute_scale_inv(max over the window)

The state is not a parameter: it is never clipped, decayed, averaged or optimized. Over
microbatches and over mesh axes it is merged by the maximum.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from loka_jax import fp8
from loka_jax.recipe import OPERANDS, Cast, Operand, Recipe


class DelayedScaling(NamedTuple):
    """The delayed-scaling state of one site.

    Attributes:
        table: float32 `[3, 1 + H]`, a row per operand: the factor that the next step
            casts with, then the amaxes of the last H steps, newest first (0 before the
            first step). One array, so that XLA updates it in one kernel.
    """

    table: Float[Array, "3 H_plus_1"]

    @property
    def scale_inv(self) -> Float[Array, "3"]:
        """The factors that the next step casts with; the least factor for amax 0."""
        return self.table[:, 0]

    @property
    def amax_history(self) -> Float[Array, "3 H"]:
        """The amaxes of the last H steps, newest first."""
        return self.table[:, 1:]


def init_delayed(recipe: Recipe) -> DelayedScaling:
    """Returns the state of a site before its first step."""
    history = jnp.zeros((len(OPERANDS), recipe.amax_history_length), jnp.float32)
    return DelayedScaling(_table(history, recipe))


def update_delayed(
    state: DelayedScaling, amaxes: Float[Array, "3"], recipe: Recipe
) -> DelayedScaling:
    """Returns the state after a step in which the operands had these amaxes.

    A non-finite amax never enters the history, where it would set the scale for the
    whole window: that operand's row stays as it was.
    """
    amaxes = amaxes[:, None]
    history = jnp.concatenate([amaxes, state.amax_history[:, :-1]], axis=1)
    table = _table(history, recipe)
    return DelayedScaling(jnp.where(jnp.isfinite(amaxes), table, state.table))


def delayed_scale_inv(
    state: DelayedScaling,
    operand: Operand,
    amax: Float[Array, ""],
    cast: Cast,
    recipe: Recipe,
) -> Float[Array, ""]:
    """Returns the factor to cast `operand` with in this step.

    The stored factor if there is one. Before the first amax, the current factor, so
    that a first step neither clips nor flushes. That guard makes the cast wait for this
    step's amax; `recipe.scales_initialized` promises that it is not needed and drops it
    (an operand that was all zero over the window is then cast to zero once more).

    A stored scale does not depend on this step: infinite elements saturate under it.
    """
    row = OPERANDS.index(operand)
    stored = state.scale_inv[row]
    if recipe.scales_initialized:
        return stored
    current = fp8.compute_scale_inv(amax, cast.dtype, pow2_scale=cast.pow2_scale)
    return jnp.where(jnp.any(state.amax_history[row] > 0), stored, current)


def stored_scales(
    state: DelayedScaling | None, recipe: Recipe
) -> tuple[Float[Array, ""] | None, ...]:
    """Returns the stored factors that lhs, rhs and g are cast with.

    None for an operand without a cast, or with a cast by its current amax.
    """
    if state is None or not recipe.scales_initialized:
        return (None,) * len(OPERANDS)
    return tuple(
        state.scale_inv[row]
        if any(cast.scaling == "delayed" for cast in recipe.casts(operand))
        else None
        for row, operand in enumerate(OPERANDS)
    )


def merge_delayed[State](a: State, b: State) -> State:
    """Returns the states after two microbatches that started from the same ones.

    The element-wise maximum: both shifted the same history and put their amax in
    front, and a factor grows with its amax. Zeros are neutral.

    Args:
        a, b: a `DelayedScaling`, or a tree of them.
    """
    return jax.tree.map(jnp.maximum, a, b)


def scales_initialized(state: DelayedScaling) -> Bool[Array, ""]:
    """Returns True if every operand has a nonzero amax in its history."""
    return jnp.all(jnp.any(state.amax_history > 0, axis=1))


def _table(history: Array, recipe: Recipe) -> Array:
    """Returns the factors that the histories give, followed by the histories."""
    # Element by element, not one reduction: XLA then fuses it with the shift.
    columns = jnp.split(history, history.shape[1], axis=1)
    largest = functools.reduce(jnp.maximum, columns)
    scales = [_scale_inv_of(o, largest[i], recipe) for i, o in enumerate(OPERANDS)]
    return jnp.concatenate([jnp.stack(scales), history], axis=1)


def _scale_inv_of(operand: Operand, amax, recipe: Recipe):
    casts = [cast for cast in recipe.casts(operand) if cast.scaling == "delayed"]
    if not casts:
        return jnp.zeros_like(amax)
    # For amax 0 this is the least factor there is, so that in a maximum (over
    # microbatches, over devices) every measured factor prevails over it.
    return fp8.compute_scale_inv(
        amax, casts[0].dtype, pow2_scale=casts[0].pow2_scale, margin=recipe.margin
    )
