"""Any Flax NNX model with its dense layers as sites.

    model = nn.convert(your_model, recipe="fp8_tensorwise_delayed", skip="head")

    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, nn.Fp8State))
    gradients = nnx.grad(loss, argnums=wrt)(model, batch)
    optimizer.update(model, nn.take_scaling(model, gradients))

NNX's `Linear`, `LinearGeneral` (and with it the projections of attention) and `Einsum`
take their product as an attribute: here a module, which holds the delayed scales. The
parameters stay where they are.
"""

import fnmatch
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.core import Tracer
from jaxtyping import Array

from loka_jax import scaling
from loka_jax.nn.context import as_recipe
from loka_jax.nn.dense import einsum, product, weight_has_fp8
from loka_jax.nn.overwriting import next_table
from loka_jax.recipe import Recipe

_APART = "in an NNX model norms and activations stay the model's own"


class Fp8State(nnx.Variable):
    """The delayed scales of a site, whose gradient is their next value."""


class ProbeStats(nnx.Variable):
    """What Probe learned of a site; its gradient is what it saw in a batch."""


class _Value(NamedTuple):
    """What a variable of a Linen module has."""

    value: Any


class SiteProduct(nnx.Module):
    """The product of an NNX layer as a site.

    Attributes:
        axis_names: none: under `shard_map`, JAX knows which values vary.
    """

    axis_names: tuple[str, ...] = ()

    def __init__(self, path: tuple[str, ...], recipe: Recipe, has_state: bool):
        self.path = path
        self.recipe = recipe
        state = Fp8State(scaling.init_delayed(recipe).table) if has_state else None
        self.scaling: Any = nnx.data(state)
        self.stats: Any = nnx.data(None)

    def __call__(
        self, lhs, rhs, dimension_numbers, precision=None, **options: Any
    ) -> Array:
        """Returns `jax.lax.dot_general` of the operands; `out_sharding` is ours."""
        dtype = options.get("preferred_element_type")
        return product(
            self, lhs, rhs, dimension_numbers, precision, dtype, apart=_APART
        )

    def is_initializing(self) -> bool:
        """Returns False: NNX has no pass that makes the variables."""
        return False

    def has_variable(self, collection: str, name: str) -> bool:
        """Returns True: a variable that is missing has an error of its own."""
        del collection, name
        return True

    def get_variable(self, collection: str, name: str) -> Any:
        """Returns the site's delayed scales, None without any."""
        del collection, name
        return None if self.scaling is None else self.scaling.get_value()

    def variable(self, collection: str, name: str, init: Any) -> Any:
        """Returns a variable of the site, as a Linen module does.

        Raises:
            ValueError: if Probe has not seen the model outside of transformations, or
                the site has no delayed scales.
        """
        del name
        if collection == OVERWRITE_WITH_GRADIENT:
            if self.scaling is None:
                raise ValueError(
                    f"site {'/'.join(self.path)!r} has no delayed scales: convert the "
                    "model with a recipe that has them, such as "
                    "'fp8_tensorwise_delayed'."
                )
            return _Value(self.scaling.get_value())
        if self.stats is None:
            if isinstance(jnp.zeros(()), Tracer):
                raise ValueError(
                    "Probe's statistics are made by a call of the model under "
                    "nn.probing outside of jit and grad: call it once before."
                )
            self.stats = nnx.data(ProbeStats(init()))
        return _Value(self.stats.get_value())


class SiteEinsum(SiteProduct):
    """The einsum of an NNX layer as a site."""

    def __call__(
        self, equation: str, lhs, rhs, precision=None, **options: Any
    ) -> Array:
        """Returns `jax.numpy.einsum` of the operands; `out_sharding` is ours."""
        dtype = options.get("preferred_element_type")
        return einsum(self, equation, lhs, rhs, precision, dtype, apart=_APART)


def convert_nnx(
    model: Any, recipe: str | Recipe, only: tuple[str, ...], skip: tuple[str, ...]
) -> Any:
    """Returns a copy of an NNX model with its dense layers as sites.

    Args:
        only, skip: patterns of paths of layers, see `convert`.

    Raises:
        ValueError: if a pattern matches no layer, or there is none; if a layer is a
            stack of `nnx.vmap` and the recipe delayed.
    """
    model = nnx.clone(model)
    layers = {
        "/".join(map(str, path)): layer
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral | nnx.Einsum)
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no Linear, LinearGeneral or Einsum of Flax "
            "NNX: there is nothing to convert."
        )
    for pattern in (*only, *skip):
        if not fnmatch.filter(layers, pattern):
            raise ValueError(
                f"pattern {pattern!r} matches no dense layer: there are "
                f"{', '.join(layers)}."
            )
    for path, layer in layers.items():
        included = any(fnmatch.fnmatchcase(path, pattern) for pattern in only)
        if included and not any(fnmatch.fnmatchcase(path, p) for p in skip):
            _convert_layer(path, layer, as_recipe(recipe))
    return model


def take_scaling(model: Any, gradients: Any) -> Any:
    """Overwrites a model's FP8 states by their gradients; returns all other gradients.

    The state of a site on which the loss does not depend stays as it was.
    """
    states, rest = nnx.split_state(gradients, Fp8State, ...)
    old = dict(nnx.to_flat_state(nnx.state(model, Fp8State)))
    new = [
        (path, jax.tree.map(next_table, old[path], state))
        for path, state in nnx.to_flat_state(states)
    ]
    nnx.update(model, nnx.from_flat_state(new))
    return rest


def _convert_layer(path: str, layer: Any, recipe: Recipe) -> None:
    """Gives a layer our product, unless it has one of its own."""
    if isinstance(layer, nnx.Einsum):
        if layer.einsum_op is jnp.einsum:
            layer.einsum_op = nnx.data(_site(SiteEinsum, path, layer, recipe))
    elif layer.dot_general in (None, jax.lax.dot_general):
        if getattr(layer, "dot_general_cls", None) is None:
            layer.dot_general = nnx.data(_site(SiteProduct, path, layer, recipe))


def _site(
    kind: type[SiteProduct], path: str, layer: Any, recipe: Recipe
) -> SiteProduct:
    if recipe.is_delayed:
        _check_not_stacked(path, layer, recipe)
    has_state = recipe.is_delayed and _has_fp8(layer)
    return kind(tuple(path.split("/")), recipe, has_state)


def _check_not_stacked(path: str, layer: Any, recipe: Recipe) -> None:
    """Refuses layers that `nnx.vmap` stacked: each needs delayed scales of its own."""
    if isinstance(layer, nnx.Einsum):
        own = layer.kernel_shape
    else:
        batch = getattr(layer, "batch_axis", {})
        own = (*batch.values(), layer.in_features, layer.out_features)
    if layer.kernel.ndim > len(jax.tree.leaves(own)):
        raise ValueError(
            f"layer {path!r} is a stack, with a kernel of shape {layer.kernel.shape}, "
            f"and recipe {recipe.name!r} needs delayed scales for each layer in it: "
            "convert inside of the constructor given to nnx.vmap, or take a recipe "
            "without a state, such as 'fp8_tensorwise'."
        )


def _has_fp8(layer: Any) -> bool:
    """Returns False for a layer that can never be in FP8, and keeps no scales."""
    if isinstance(layer, nnx.Einsum):
        left, right = (layer.einsum_str or ",").partition("->")[0].split(",")
        sizes = dict(zip(right.strip(), layer.kernel_shape, strict=False))
        k = math.prod(size for c, size in sizes.items() if c in left)
        return weight_has_fp8(k, math.prod(layer.kernel_shape) // k)
    n = math.prod(jax.tree.leaves(layer.out_features))
    return weight_has_fp8(layer.kernel.size // n, n)
