"""Scales of the operands of a site: from this step's amax, or from a history.

Current scaling needs no state. Delayed scaling keeps, for lhs, rhs and g of a site, the
scales that the amaxes of the last H steps would give, and that of the next step:

    f = compute_scale_inv(amax)      scale_inv = min(max over the window of f, limit)

Without the limit an outlier, such as a sentinel among the features, would set the scale
of the whole window, and all other values would flush to zero. The limit lies above the
level of the window, which is the largest f that `_HELD_STEPS` steps in a row reached,
by all that the format spares: `_KEPT_BITS` bits of normal numbers are left below it.
Outliers saturate. Amaxes within a factor of 8, as in healthy training, never do. A
gradient may reach 1,024 levels: a click among batches without one is no outlier.

The state is float32 that its "gradient" replaces. Sums, means and multiples of states
read as their maximum, see `maxima`: so what averages, clips or scales changes no scale.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from loka_jax import fp8, maxima
from loka_jax.mapped import equally_varying
from loka_jax.recipe import OPERANDS, Cast, Operand, Recipe

# Outliers in fewer steps in a row set no level; a jump that stays does after as many.
_HELD_STEPS = 5
# At a margin of 1 bit the limit is 8 levels of lhs and rhs in E4M3, enough for growth
# of 1.6 a step over `_HELD_STEPS`, which is then never clipped.
_KEPT_BITS: dict[Operand, int] = {"lhs": 10, "rhs": 10, "g": 3}

# The weight of a measured row: so small that norms of all gradients do not notice it.
_WEIGHT = 2.0**-14
# The weight of a row that was not measured: any other use of the site prevails.
_FAINT_WEIGHT = 2.0**-12 * _WEIGHT
_ROOTS = 1 + 2 * maxima.ENTRIES  # the first column of roots
_UNIT = 2.0**-31  # of roots, which are then below 1

# Columns of a use, see `uses_of`.
_USE = 1 + maxima.ENTRIES
# Of a use that measured nothing; sums of fewer than 2^20 are below 1.
_UNMEASURED = 2.0**-20


class DelayedScaling(NamedTuple):
    """The delayed-scaling state of one site.

    Attributes:
        table: float32 `[..., 3, C]`, a row per operand: its weight; what `maxima` makes
            of the scale of the next step; of that of the newest amax; and the fourth
            roots of those before. Everything is times the weight. Zeros before the
            first step. One array, so that XLA updates it in one kernel.
    """

    table: Float[Array, "*s 3 C"]

    def factor(self, operand: Operand) -> Float[Array, ""]:
        """Returns the factor of an operand; by itself it costs a kernel no copy."""
        return _read(self.table[OPERANDS.index(operand)])

    @property
    def factors(self) -> Float[Array, "*s 3"]:
        """The factors that the next step casts with; 0 before the first amax.

        NaN if an entry is negative or not finite: no step has made it.
        """
        return _read(self.table)

    @property
    def scale_inv(self) -> Float[Array, "*s 3"]:
        """The same, but the least factor before the first amax."""
        return jnp.maximum(self.factors, maxima.SMALLEST)

    @property
    def history(self) -> Float[Array, "*s 3 H"]:
        """The factors of the amaxes of the last H steps, newest first; 0 of zeros."""
        return _of_root(jnp.concatenate(self.roots(), axis=-1))

    def roots(self) -> list[Float[Array, "*s 3 1"]]:
        """Returns the roots of the history, newest first; columns fuse with others."""
        newest = maxima.decode(self.table[..., 1 + maxima.ENTRIES : _ROOTS])
        weight, earlier = self.table[..., :1], self.table[..., _ROOTS:]
        inverse = 1.0 / jnp.where(weight > 0, weight, 1.0)
        columns = jnp.split(earlier, earlier.shape[-1], axis=-1)
        return [_root(newest), *(column * inverse for column in columns)]


# Under jit, as is what changes states: sites alike or not have states of one shape, for
# which JAX traces and lowers this once.
@jax.jit
def _read(rows: Float[Array, "*s C"]) -> Float[Array, "*s"]:
    if rows.shape[-1] == _USE:
        return rows[..., 0]
    entries = rows[..., 1 : 1 + maxima.ENTRIES]
    is_sum, factors = maxima.is_sum(entries), maxima.decode(entries)
    return jnp.where(is_sum, factors, jnp.nan)[..., 0]


def init_delayed(recipe: Recipe) -> DelayedScaling:
    """Returns the state of a site before its first step."""
    columns = _ROOTS + recipe.amax_history_length - 1
    return DelayedScaling(jnp.zeros((len(OPERANDS), columns), jnp.float32))


def stored(factors: Float[Array, "3"], recipe: Recipe) -> DelayedScaling:
    """Returns the state of a site after one step, whose amaxes gave these factors."""
    never = [jnp.zeros((len(OPERANDS), 1))] * (recipe.amax_history_length - 1)
    return DelayedScaling(_table(factors[:, None], never, recipe))


def update_delayed(
    state: DelayedScaling, amaxes: Float[Array, "3"], recipe: Recipe
) -> DelayedScaling:
    """Returns the state after a step in which the operands had these amaxes.

    A non-finite amax never enters the history, where it would set the scale for the
    whole window: that operand's row stays as it was.
    """
    amaxes = amaxes[:, None]
    is_measured = jnp.isfinite(amaxes)
    newest = _factors(jnp.where(is_measured, amaxes, 0.0), recipe)
    table = _table(newest, state.roots()[:-1], recipe)
    return DelayedScaling(jnp.where(is_measured, table, state.table))


@functools.partial(jax.jit, static_argnames="recipe")
def contributions(
    tables: Float[Array, "*s 3 C"], amaxes: Float[Array, "*s 3"] | None, recipe: Recipe
) -> Float[Array, "*s 3 C"]:
    """Returns what one use of each site adds to its next state: its gradient.

    Rows are those of `update_delayed`, but faint where that leaves the state as it was:
    of several uses those that measured an operand prevail.

    Args:
        tables: of a site's state, or of several sites, stacked; or what `uses_of` reads
            of them.
        amaxes: of their operands; not finite where not measured; None if none was.
    """
    is_use = tables.shape[-1] == _USE
    if amaxes is None:
        return _unmeasured(tables) if is_use else _faint(tables)
    each = functools.partial(_use if is_use else _contribution, recipe)
    return _shared(jax.vmap(each) if tables.ndim == 3 else each)(tables, amaxes)


def uses_of(tables: Float[Array, "s 3 C"], recipe: Recipe) -> Float[Array, "s 3 U"]:
    """Returns what the sites of a program read of their states, all states at once.

    A site takes it in place of its table: the first column has the factors. What a use
    adds, its gradient, is no new table yet but a weight, and what `maxima` makes of the
    factor of the newest amax; the tables of all sites are made of these at once. By
    itself each site would have several hundred operations to compile.

    Args:
        tables: of the states of sites.
        recipe: of all of them.
    """
    uses: Any = _uses(tables, recipe)
    return uses


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _uses(tables, recipe):
    del recipe
    return jnp.pad(_read(tables)[..., None], ((0, 0), (0, 0), (0, _USE - 1)))


def _uses_forward(tables, recipe):
    return _uses(tables, recipe), tables


@functools.partial(jax.jit, static_argnums=0)
def _uses_backward(recipe, tables, uses):
    return (_shared(jax.vmap(functools.partial(_next, recipe)))(tables, uses),)


_uses.defvjp(_uses_forward, _uses_backward)


def _use(recipe: Recipe, use: Array, amaxes: Array) -> Array:
    amaxes = amaxes[:, None]
    is_measured = jnp.isfinite(amaxes)
    newest = _factors(jnp.where(is_measured, amaxes, 0.0), recipe)
    own = jnp.concatenate([jnp.ones_like(newest), maxima.encode(newest)], axis=1)
    return jnp.where(is_measured, own, _unmeasured(use))


def _unmeasured(uses: Array) -> Array:
    row = np.array([_UNMEASURED, *[0.0] * maxima.ENTRIES], np.float32)
    return equally_varying(jnp.broadcast_to(row, uses.shape), uses)[0]


def _next(recipe: Recipe, table: Array, use: Array) -> Array:
    """Returns the next table of a site; zeros if nothing used it."""
    weight, newest = use[:, :1], maxima.decode(use[:, 1:])
    next_table = _table(newest, DelayedScaling(table).roots()[:-1], recipe)
    unmeasured = jnp.where(weight > 0, _faint(table), 0.0)
    return jnp.where(weight >= 1, next_table, unmeasured)


type _OfTableAndAmaxes = Callable[[Array, Array], Array]


def _contribution(recipe: Recipe, table: Array, amaxes: Array) -> Array:
    updated = update_delayed(DelayedScaling(table), amaxes, recipe).table
    return jnp.where(jnp.isfinite(amaxes)[:, None], updated, _faint(table))


def _faint(tables: Array) -> Array:
    weight = tables[..., :1]
    return tables * (_FAINT_WEIGHT / jnp.where(weight > 0, weight, _FAINT_WEIGHT))


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
    stored = state.factor(operand)
    if recipe.scales_initialized:
        return jnp.maximum(stored, maxima.SMALLEST)
    current = fp8.compute_scale_inv(amax, cast.dtype, pow2_scale=cast.pow2_scale)
    return jnp.where(stored != 0, stored, current)


def stored_scales(
    state: DelayedScaling | None, recipe: Recipe
) -> tuple[Float[Array, ""] | None, ...]:
    """Returns the stored factors that lhs, rhs and g are cast with.

    None for an operand without a cast, or with a cast by its current amax.
    """
    if state is None or not recipe.scales_initialized:
        return (None,) * len(OPERANDS)
    return tuple(
        None
        if delayed_cast(operand, recipe) is None
        else jnp.maximum(state.factor(operand), maxima.SMALLEST)
        for operand in OPERANDS
    )


def merge_delayed[State](a: State, b: State) -> State:
    """Returns the states after two microbatches that started from the same ones.

    The element-wise maximum, which is that of the scales; zeros are neutral. A sum or a
    mean would be read as the same, if of few states.
    """
    return jax.tree.map(jnp.maximum, a, b)


def scales_initialized(state: DelayedScaling) -> Bool[Array, ""]:
    """Returns True if every operand has a nonzero amax in its history."""
    return jnp.all(state.factors > 0)


def amax_ratios(
    history: Float[Array, "3 H"], recipe: Recipe, steps: int
) -> Float[Array, "3 n"]:
    """Returns how far the newest amaxes reached into what their scales covered.

        ratio = f / (2^margin f'),        f' = scale_inv before the step

    These are powers of two. Above 1 elements were clipped. 0 if the amax is 0, or those
    before all are.

    Args:
        steps: n, the number of steps, newest first. The windows of older steps reach
            beyond the history, so n should be at most half of H.
    """
    columns = jnp.split(history, history.shape[1], axis=1)
    never = [jnp.zeros_like(columns[0])] * steps
    before = [[*columns[i:], *never[:i]] for i in range(1, steps + 1)]
    covered = [_covered(each, recipe, power=1.0) for each in before]
    reach = jnp.concatenate(covered, axis=1) * 2.0**recipe.margin
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


def _covered(columns: list[Array], recipe: Recipe, power: float) -> Array:
    """Returns the largest factors `[3, 1]`, or the limits where these are lower.

    Args:
        columns: powers of the factors of earlier steps.
    """
    largest, level = _largest(columns), _level(columns)
    headroom = np.array([[_headroom(o, recipe) ** power] for o in OPERANDS], "f4")
    limit = jnp.where(level > 0, level * headroom, jnp.inf)
    return jnp.minimum(largest, limit)


def _level(factors: list[Array]) -> Array:
    """Returns the largest factor that steps in a row reached; 0 if each had a zero."""
    steps = min(_HELD_STEPS, len(factors))
    starts = range(len(factors) - steps + 1)
    return _largest([_smallest(factors[i : i + steps]) for i in starts])


_largest = functools.partial(functools.reduce, jnp.maximum)
_smallest = functools.partial(functools.reduce, jnp.minimum)


def _table(newest: Array, earlier: list[Array], recipe: Recipe) -> Array:
    """Returns the table of the newest factors and of the roots of those before."""
    roots = [_root(newest), *earlier]
    maximum = _of_root(_covered(roots, recipe, power=1 / 4))
    ones = jnp.ones((len(OPERANDS), 1), jnp.float32)
    parts = [ones, maxima.encode(maximum), maxima.encode(newest), *earlier]
    return _WEIGHT * jnp.concatenate(parts, axis=1)


def _root(factor: Array) -> Array:
    return jnp.sqrt(jnp.sqrt(factor)) * _UNIT


def _of_root(root: Array) -> Array:
    """Returns the power of two that is nearest to that of which this is the root."""
    power = (jnp.where(root > 0, root, 1.0) / _UNIT) ** 4
    return jnp.where(root > 0, fp8.power_of_two_up(power * math.sqrt(0.5)), 0.0)


def _headroom(operand: Operand, recipe: Recipe) -> float:
    """Returns the limit over the level, at least 1; infinite without a delayed cast."""
    cast = delayed_cast(operand, recipe)
    if cast is None:
        return math.inf
    smallest_normal = float(jnp.finfo(cast.dtype).smallest_normal)
    kept = smallest_normal * 2.0 ** (_KEPT_BITS[operand] + recipe.margin)
    return 2.0 ** max(0, math.floor(math.log2(fp8.fp8_max(cast.dtype) / kept)))


def delayed_cast(operand: Operand, recipe: Recipe) -> Cast | None:
    """Returns the cast of an operand by earlier amaxes, None without one."""
    casts = (cast for cast in recipe.casts(operand) if cast.scaling == "delayed")
    return next(casts, None)


def _factors(amaxes: Array, recipe: Recipe) -> Array:
    """Returns the factors that amaxes give by themselves, powers of two; 0 for 0.

    Without a delayed cast a factor of 1 says that there was an amax.
    """
    casts = [delayed_cast(operand, recipe) for operand in OPERANDS]
    largest = [1.0 if cast is None else fp8.fp8_max(cast.dtype) for cast in casts]
    limit = np.array(largest, np.float32)[:, None] * np.float32(2.0**-recipe.margin)
    # Inverted as `fp8.compute_scale_inv` does it.
    scale = jnp.divide(limit, jnp.maximum(amaxes, limit * np.float32(maxima.SMALLEST)))
    is_cast = np.array([[cast is not None] for cast in casts])
    factors = jnp.where(is_cast, 1.0 / fp8.power_of_two_down(scale), 1.0)
    return jnp.where(amaxes > 0, factors, 0.0)
