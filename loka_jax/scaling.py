"""Scales of the operands of a site: from this step's amax, or from a history.

Current scaling needs no state. Delayed scaling keeps, for the three operands of a site
(lhs, rhs, g, in this order), a short window of amaxes and the scale they give:

    scale_inv = compute_scale_inv(min(max over the window, limit))

Without the limit an outlier, such as a sentinel among the features, would set the scale
of the whole window, and all other values would flush to zero. The limit lies above the
level of the window, which is the largest amax that `_HELD_STEPS` steps in a row
reached, by all that the format spares: `_KEPT_BITS` bits of normal numbers are left
below the level. Outliers saturate. Where the amaxes of a window lie within a factor of
14, as in healthy training, there is no difference. A gradient may reach 1,792 levels:
a click among batches without one is no outlier.

The state is not a parameter: it is never clipped, decayed, averaged or optimized. Over
microbatches, over mesh axes and over several calls of a site it is merged by the
maximum.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from loka_jax import fp8, max_merge
from loka_jax.recipe import OPERANDS, Cast, Operand, Recipe

# Outliers in fewer steps in a row set no level; a jump that stays does after as many.
_HELD_STEPS = 5
# At a margin of 1 bit the limit is 14 levels of lhs and rhs in E4M3, just enough for
# growth of 1.9 a step over `_HELD_STEPS`, which is then never clipped.
_KEPT_BITS: dict[Operand, int] = {"lhs": 10, "rhs": 10, "g": 3}


@jax.tree_util.register_pytree_with_keys_class
class DelayedScaling(NamedTuple):
    """The delayed-scaling state of one site.

    Inside of a function that JAX differentiates with respect to it the table is
    `max_merge.MaxMerged`, so that JAX merges the states after several uses by their
    maximum; see `readable`.

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

    def tree_flatten_with_keys(self):
        """Returns the table with its key, as JAX asks of a container."""
        return ((jax.tree_util.GetAttrKey("table"), self.table),), None

    @classmethod
    def tree_unflatten(cls, _, tables) -> "DelayedScaling":
        """Returns the state of a table, which enters or leaves a transformation here.

        `jax.grad` and its like hand their arguments over through this function, before
        anything can use the table twice.
        """
        (table,) = tables
        return cls(max_merge.merged_if_differentiated(table))


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


def readable(state: DelayedScaling) -> DelayedScaling:
    """Returns the state with its table in float32, for one use.

    If JAX differentiates, the gradient of the result must be from `contributions`.

    Raises:
        ValueError: under a `shard_map` across which the gradient would be summed.
    """
    return DelayedScaling(max_merge.unmerged(max_merge.merged(state.table)))


def contributions(
    tables: Float[Array, "*s 3 H_plus_1"],
    amaxes: Float[Array, "*s 3"] | None,
    recipe: Recipe,
) -> Float[Array, "*s 3 H_plus_1"]:
    """Returns what one use of each site adds to its next state: its gradient.

    Rows are those of `update_delayed`, but -inf where that leaves the state as it was:
    of several uses those that measured an operand prevail.

    Args:
        tables: of a site's state, from `readable`, or of several sites, stacked.
        amaxes: of their operands; not finite where not measured; None if none was.
        recipe: of all these sites.
    """
    if amaxes is None:
        return jnp.full_like(tables, -jnp.inf)
    each = functools.partial(_contribution, recipe)
    return _shared(jax.vmap(each) if tables.ndim == 3 else each)(tables, amaxes)


type _OfTableAndAmaxes = Callable[[Array, Array], Array]


def _contribution(recipe: Recipe, table: Array, amaxes: Array) -> Array:
    updated = update_delayed(DelayedScaling(table), amaxes, recipe).table
    return jnp.where(jnp.isfinite(amaxes)[:, None], updated, -jnp.inf)


def _shared(function: _OfTableAndAmaxes) -> _OfTableAndAmaxes:
    """Returns the function such that examples under `vmap` that share a table get one.

    JAX would compute a table for each example, and sum them.
    """
    shared = jax.custom_batching.custom_vmap(function)

    @shared.def_vmap
    def over_examples(size, is_batched, table, amaxes):
        del size
        has_own_table, has_own_amaxes = is_batched
        if not has_own_table:
            return shared(table, jnp.max(amaxes, axis=0)), False
        axes = (0, 0 if has_own_amaxes else None)
        return _shared(jax.vmap(function, in_axes=axes))(table, amaxes), True

    return shared


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


def covered_amax(history: Float[Array, "3 H"], recipe: Recipe) -> Float[Array, "3"]:
    """Returns the amaxes that the factors of these histories are made for.

    These are the largest ones, or the limits where these are lower.
    """
    return _covered(history, recipe)[:, 0]


def amax_ratios(
    history: Float[Array, "3 H"], recipe: Recipe, steps: int
) -> Float[Array, "3 n"]:
    """Returns how far the newest amaxes reached into what their scales covered.

        ratio = amax / (2^margin covered_amax(the amaxes before))

    Above 1 elements were clipped. 0 if the amax is 0, or those before all are.

    Args:
        history: as in `DelayedScaling`.
        recipe: of the site.
        steps: n, the number of steps, newest first. Of the oldest of H - 1 amaxes only
            those in the history are known, so n should be at most half of H.
    """
    before = [jnp.pad(history[:, i:], ((0, 0), (0, i))) for i in range(1, steps + 1)]
    covered = jax.vmap(functools.partial(covered_amax, recipe=recipe), out_axes=1)
    reach = covered(jnp.stack(before)) * 2.0**recipe.margin
    ratios = history[:, :steps] / jnp.where(reach > 0, reach, 1.0)
    return jnp.where(reach > 0, ratios, 0.0)


def smallest_ratio(operand: Operand, recipe: Recipe) -> float | None:
    """Returns the ratio (`amax_ratios`) of an amax of which the cast leaves one bit.

    None if the operand has no delayed cast.
    """
    cast = delayed_cast(operand, recipe)
    if cast is None:
        return None
    smallest = float(jnp.finfo(cast.dtype).smallest_subnormal)
    return smallest / fp8.fp8_max(cast.dtype)


def _covered(history: Array, recipe: Recipe) -> Array:
    """Returns `covered_amax` as `[3, 1]`."""
    # Column by column, not by reductions: XLA then fuses all of it with the shift.
    columns = jnp.split(history, history.shape[1], axis=1)
    largest, level = _largest(columns), _level(columns)
    headroom = jnp.float32([_headroom(operand, recipe) for operand in OPERANDS])
    limit = jnp.where(level > 0, level * headroom[:, None], jnp.inf)
    return jnp.minimum(largest, limit)


def _level(amaxes: list[Array]) -> Array:
    """Returns the largest amax that steps in a row reached; 0 if one of each was 0."""
    steps = min(_HELD_STEPS, len(amaxes))
    starts = range(len(amaxes) - steps + 1)
    return _largest([_smallest(amaxes[i : i + steps]) for i in starts])


_largest = functools.partial(functools.reduce, jnp.maximum)
_smallest = functools.partial(functools.reduce, jnp.minimum)


def _table(history: Array, recipe: Recipe) -> Array:
    """Returns the factors that the histories give, followed by the histories."""
    amaxes = _covered(history, recipe)
    scales = [_scale_inv_of(o, amaxes[i], recipe) for i, o in enumerate(OPERANDS)]
    return jnp.concatenate([jnp.stack(scales), history], axis=1)


def _headroom(operand: Operand, recipe: Recipe) -> float:
    """Returns the limit over the level, at least 1; infinite without a delayed cast."""
    cast = delayed_cast(operand, recipe)
    if cast is None:
        return math.inf
    smallest_normal = float(jnp.finfo(cast.dtype).smallest_normal)
    kept = smallest_normal * 2.0 ** (_KEPT_BITS[operand] + recipe.margin)
    return max(1.0, fp8.fp8_max(cast.dtype) / kept)


def delayed_cast(operand: Operand, recipe: Recipe) -> Cast | None:
    """Returns the cast of an operand by earlier amaxes, None without one."""
    casts = (cast for cast in recipe.casts(operand) if cast.scaling == "delayed")
    return next(casts, None)


def _scale_inv_of(operand: Operand, amax: Array, recipe: Recipe) -> Array:
    cast = delayed_cast(operand, recipe)
    if cast is None:
        return jnp.zeros_like(amax)
    # For amax 0 this is the least factor there is, so that in a maximum (over
    # microbatches, over devices) every measured factor prevails over it.
    return fp8.compute_scale_inv(
        amax, cast.dtype, pow2_scale=cast.pow2_scale, margin=recipe.margin
    )
