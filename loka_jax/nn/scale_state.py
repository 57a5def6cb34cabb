"""Is a delayed-scaling state one that sites have made?

The state is no parameter, but it lies beside them in the variables of a model. An
optimizer, a weight decay or a mean that takes it for one makes numbers of it that no
site makes: stored scales are positive, finite and, unless a recipe says otherwise,
powers of two. Outside of jit such a state is refused by an error that names the site.
Inside, where values are unknown, all its factors become NaN: so does the loss.

A scale of 0 is the gradient that JAX gives to a site on which the loss does not
depend. It is read as that of a site before its first step.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.core import Tracer
from jaxtyping import Array

from loka_jax import scaling
from loka_jax.recipe import OPERANDS, Recipe
from loka_jax.scaling import DelayedScaling

_NAME = "fp8_scaling"  # of the variable
_MANTISSA = 0x007F_FFFF  # bits of a float32; none is set in a power of two
_REMEDY = (
    f"The collection {OVERWRITE_WITH_GRADIENT!r} is no parameter, its gradient is its "
    "next value. Wrap the optimizer, nn.overwriting(tx), and add up gradients of "
    "microbatches by nn.accumulate."
)
_MISSING = (
    "give `apply` all that `init` returned, {'params': ..., "
    f"{OVERWRITE_WITH_GRADIENT!r}: ...}}"
)
_LIFTED = (
    f"a transformation of Flax around it does not hand {OVERWRITE_WITH_GRADIENT!r} "
    "on; name it as 'params' is, nn.scan(..., variable_axes={'params': 0, "
    f"{OVERWRITE_WITH_GRADIENT!r}: 0}})"
)


def read_scaling(module: Any, recipe: Recipe) -> DelayedScaling:
    """Returns the delayed-scaling state of a site, made anew by `init`.

    Args:
        module: of the site.
        recipe: of the site, with delayed scaling.

    Raises:
        ValueError: if the variables lack the state, or hold it in another type, as
            after a restore without a template. Outside of jit also if a scale is not
            one that a site makes; inside, all scales are NaN then.
    """
    path = "/".join(module.path)
    if not _has_state(module):
        remedy = _LIFTED if module.is_initializing() else _MISSING
        raise ValueError(
            f"site {path!r} has no delayed scales, which its recipe {recipe.name!r} "
            f"needs: {remedy}, or take a recipe without a state, such as "
            "'fp8_tensorwise'."
        )
    init = functools.partial(scaling.init_delayed, recipe)
    state = module.variable(OVERWRITE_WITH_GRADIENT, _NAME, init).value
    _check_type(path, state)
    if not isinstance(state.table, Tracer):
        table = np.asarray(state.table)
        _check(path, table, _is_scale(table, recipe))
    return DelayedScaling(_castable(recipe, state.table))


def check_scales(variables: Any, *, pow2_scale: bool = True) -> None:
    """Checks the delayed scales among the variables of models, outside of jit.

    To be called once a loss is NaN, or after a restore.

    Args:
        variables: all of a model, or of several in one tree.
        pow2_scale: scales are powers of two, as those of all recipes of this library;
            False if one of your own has a delayed `Cast` with `pow2_scale=False`.

    Raises:
        ValueError: naming a site with a scale that is negative, not finite or, unless
            it may be, no power of two; or one whose state has lost its type in a
            restore without a template.
    """
    leaves = jax.tree_util.tree_leaves_with_path(
        variables, is_leaf=lambda x: isinstance(x, DelayedScaling)
    )
    for path, state in leaves:
        if not any(_name(key) == _NAME for key in path):
            continue
        _check_type(_site_of(path), state)
        table = np.asarray(state.table)
        valid = [_is_factor(scales, pow2_scale) for scales in _factors(table)]
        _check(_site_of(path), table, valid)


def _site_of(path: Any) -> str:
    """Returns the path of a site, given that of its variable or of a part of it."""
    names = [_name(key) for key in path]
    names = names[: names.index(_NAME)]
    return "/".join(name for name in names if name != OVERWRITE_WITH_GRADIENT)


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _has_state(module: Any) -> bool:
    return module.has_variable(
        OVERWRITE_WITH_GRADIENT, _NAME
    ) or module.is_mutable_collection(OVERWRITE_WITH_GRADIENT)


def _check_type(path: str, state: Any) -> None:
    if not isinstance(state, DelayedScaling):
        raise ValueError(
            f"the delayed scales of site {path!r} are no DelayedScaling, as after a "
            "restore without a template: restore with the variables of `init` as one, "
            "flax.serialization.from_bytes(variables, data), say."
        )


def _check(path: str, table: np.ndarray, is_scale: Sequence[Any]) -> None:
    for operand, scales, valid in zip(OPERANDS, _factors(table), is_scale, strict=True):
        for scale in np.extract(~valid, scales):
            raise ValueError(
                f"the delayed scale of {operand} at site {path!r} is {scale:.6g}, and "
                f"scales are positive, finite powers of two. {_REMEDY}"
            )


def _factors(table: np.ndarray) -> np.ndarray:
    """Returns the factors of each operand, of one site or of several, stacked."""
    return np.moveaxis(table[..., 0], -1, 0)


def _is_scale(table, recipe: Recipe) -> list[Any]:
    """Returns, for each operand, True if its stored factor is one of a site, or 0."""
    valid = []
    for row, operand in enumerate(OPERANDS):
        cast = scaling.delayed_cast(operand, recipe)
        if cast is None:
            valid.append(np.True_)
            continue
        valid.append(_is_factor(table[row, 0], cast.pow2_scale))
    return valid


def _is_factor(scale, pow2_scale: bool):
    finite = jnp.isfinite if isinstance(scale, Array) else np.isfinite
    is_factor = (scale >= 0) & finite(scale)
    if pow2_scale:
        is_factor &= (scale.view(np.int32) & _MANTISSA) == 0
    return is_factor


# Compiled, as outside of jit it would be many small calls.
_init_delayed = jax.jit(scaling.init_delayed, static_argnums=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _castable(recipe: Recipe, table: Array) -> Array:
    """Returns a table, `max_merge.MaxMerged` or not, with factors to cast with.

    Rows with a factor of 0 are new. If a factor is bad none is left, and the history is
    infinite, so that no site takes the state for a new one.
    """
    values = jax.lax.convert_element_type(table, jnp.float32)
    bad = np.full(values.shape, np.inf, np.float32)  # a constant: no kernel
    bad[:, 0] = np.nan
    # Not by a reduction, which would be a kernel of its own.
    is_valid = functools.reduce(operator.and_, _is_scale(values, recipe))
    is_cast = [scaling.delayed_cast(o, recipe) is not None for o in OPERANDS]
    is_new = (values[:, :1] == 0) & np.array(is_cast)[:, None]
    values = jnp.where(is_new, _init_delayed(recipe).table, values)
    values = jnp.where(is_valid, values, bad)
    return jax.lax.convert_element_type(values, table.dtype)


# The gradient of a state is its next value, to which nothing is done.
_castable.defvjp(
    lambda recipe, table: (_castable(recipe, table), None),
    lambda recipe, _, gradient: (gradient,),
)
