"""The delayed-scaling state of a site among the variables of a model.

It is an array of float32 in the collection `_overwrite_with_gradient`, whose "gradient"
is its next value. What sums, averages, clips or scales all gradients or all variables
leaves its scales as they are, see `scaling`. An optimizer that takes the state for a
parameter makes numbers of it that no site makes: outside of jit an error then names the
site; inside, where values are unknown, its factors become NaN, and so does the loss.
"""

import collections
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from loka_jax import scaling
from loka_jax.nn.host import Key
from loka_jax.recipe import OPERANDS, Recipe
from loka_jax.scaling import DelayedScaling

SCALES = "fp8_scaling"  # the name of the variable
# States that are read at once: XLA compiles kernels of further ones anew.
_TOGETHER = 7
_BOTH = f"'params', {OVERWRITE_WITH_GRADIENT!r}"
_REMEDY = (
    f"The collection {OVERWRITE_WITH_GRADIENT!r} is no parameter, its gradient is its "
    "next value: wrap the optimizer, nn.overwriting(tx)."
)
_MISSING = (
    "give `apply` all that `init` returned, {'params': ..., "
    f"{OVERWRITE_WITH_GRADIENT!r}: ...}}"
)
_NOT_DIFFERENTIATED = (
    "weights are differentiated and their delayed scales are not, which then never "
    "change: every step casts as a first step. Differentiate all variables, "
    "jax.grad(loss)(variables), in NNX nnx.DiffState(0, nnx.Any(nnx.Param, "
    "nn.Fp8State)), and let nn.overwriting or nn.take_scaling take the gradients. An "
    "NNX model has no scales before its first call, if nn.convert was given no inputs. "
    "Or take a recipe without a state, such as 'fp8_tensorwise'."
)


def read_scaling(module: Any, recipe: Recipe, weight: Array) -> DelayedScaling:
    """Returns the delayed-scaling state of a site, made anew by `init`.

    Args:
        weight: of the site. If JAX differentiates with respect to it and not to the
            state, which then never changes, a warning says so.

    Raises:
        ValueError: if the variables lack the state, or have no place for it; outside of
            jit also if it is not one that sites make.
    """
    _check_place(module, recipe)
    path = "/".join(module.path)
    is_new = module.is_mutable_collection(OVERWRITE_WITH_GRADIENT)
    if not (is_new or module.has_variable(OVERWRITE_WITH_GRADIENT, SCALES)):
        raise ValueError(
            f"site {path!r} has no delayed scales, which its recipe {recipe.name!r} "
            f"needs: {_MISSING}, or take a recipe without a state, such as "
            "'fp8_tensorwise'."
        )
    variable = module.variable(
        OVERWRITE_WITH_GRADIENT, SCALES, lambda: scaling.init_delayed(recipe).table
    )
    table = variable.value
    if not isinstance(table, Tracer):
        _check(path, table)
    table = _warn_if_frozen(jnp.asarray(table, jnp.float32), weight)
    return DelayedScaling(table)


def read_together(
    given: Mapping[Key, Any], recipe: Callable[[str], Recipe]
) -> dict[Key, Any]:
    """Returns the variables of sites, their states as `scaling.uses_of` reads them.

    Args:
        given: the variables of all sites of a program.
        recipe: of the site at a path.

    Raises:
        ValueError: outside of jit, if a state is not one that sites make.
    """
    read = {**given}
    alike: dict[Any, list[tuple[Key, Array]]] = collections.defaultdict(list)
    for key, value in given.items():
        collection, parts, name = key
        path = "/".join(parts)
        if (collection, name) != (OVERWRITE_WITH_GRADIENT, SCALES):
            continue
        if (own := recipe(path)).is_delayed:
            if not isinstance(value, Tracer):
                _check(path, value)
            table = jnp.asarray(value, jnp.float32)
            # Not with states that vary over other axes of a mesh.
            axes = jax.typeof(table).mat.varying
            alike[own, table.shape[-2:], axes].append((key, table))
    for (own, _, _), all_alike in alike.items():
        for some in itertools.batched(all_alike, _TOGETHER):
            tables = [x.reshape(-1, *x.shape[-2:]) for _, x in some]
            ends = [*itertools.accumulate(map(len, tables))]
            uses = scaling.uses_of(jnp.concatenate(tables), own)
            # Behind a barrier: else kernels that read a part would differ by its place.
            parts = jax.lax.optimization_barrier(jnp.split(uses, ends[:-1]))
            for (key, table), use in zip(some, parts, strict=True):
                read[key] = use.reshape(*table.shape[:-1], use.shape[-1])
    return read


def _check_place(module: Any, recipe: Recipe) -> None:
    """Refuses a site whose delayed scales have no place.

    They have none where a transformation of Flax around the site hands parameters on
    but not the scales.

    Raises:
        ValueError: naming the site and the remedies.
    """
    if module.has_variable(OVERWRITE_WITH_GRADIENT, SCALES):
        return
    path = "/".join(module.path)
    remedy = "take a recipe without a state, such as 'fp8_tensorwise'"
    lifted = module.is_initializing() and not module.is_mutable_collection(
        OVERWRITE_WITH_GRADIENT
    )
    if lifted:
        raise ValueError(
            f"site {path!r} has no place for the delayed scales of its recipe "
            f"{recipe.name!r}, as a transformation of Flax around it does not hand "
            f"{OVERWRITE_WITH_GRADIENT!r} on: {remedy}. Or name the collection as "
            "'params' is: in variable_axes of nn.scan or nn.vmap, {'params': 0, "
            f"{OVERWRITE_WITH_GRADIENT!r}: 0}}, if each step has parameters of its "
            "own (None for 0 if nn.vmap shares them), and in variable_broadcast="
            f"[{_BOTH}] of nn.scan or linen.RNN if all steps share them."
        )


@jax.custom_vjp
def _warn_if_frozen(table: Array, weight: Array) -> Array:
    """Returns the table, with a warning if only the weight is differentiated."""
    del weight
    return table


def _warn_forward(table, weight):
    if weight.perturbed and not table.perturbed:
        warnings.warn(_NOT_DIFFERENTIATED, stacklevel=2)
    return table.value, None


def _warn_backward(_, gradient):
    return None if isinstance(gradient, SymbolicZero) else gradient, None


_warn_if_frozen.defvjp(_warn_forward, _warn_backward, symbolic_zeros=True)


def tables_by_path(collection: Any) -> dict[str, Array]:
    """Returns the tables of delayed scales in a collection, by the paths of sites."""
    leaves = jax.tree_util.tree_leaves_with_path(collection)
    return {
        "/".join(_name(key) for key in path[:-1]): table
        for path, table in leaves
        if _name(path[-1]) == SCALES
    }


def check_scales(variables: Any) -> None:
    """Checks the delayed scales among the variables of models, outside of jit.

    To be called once a loss is NaN, or after a restore.

    Args:
        variables: all of a model, or of several in one tree.

    Raises:
        ValueError: naming a site whose scales no step has made.
    """
    for path, table in jax.tree_util.tree_leaves_with_path(variables):
        if any(_name(key) == SCALES for key in path):
            _check(_site_of(path), table)


def _check(path: str, table: Any) -> None:
    """Raises an error if a table, or a stack of some, is not one that sites make."""
    tables = np.asarray(table, np.float32)
    wrong = ~np.isfinite(tables) | (tables < 0)
    for operand, values, is_wrong in zip(
        OPERANDS, *(np.moveaxis(x, -2, 0) for x in (tables, wrong)), strict=True
    ):
        for value in values[is_wrong]:
            raise ValueError(
                f"the delayed scale of {operand} at site {path!r} is stored as "
                f"{value:.6g}, and no step makes such an entry. {_REMEDY}"
            )


def _site_of(path: Any) -> str:
    """Returns the path of a site, given that of its variable."""
    names = [_name(key) for key in path]
    names = names[: names.index(SCALES)]
    return "/".join(name for name in names if name != OVERWRITE_WITH_GRADIENT)


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)
