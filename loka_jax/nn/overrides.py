"""Recipes of single sites, given from outside of a model.

    with overriding({"top_mlp/dense_1": "bf16"}):
        logits = model.apply(variables, x)

Modules look while they are traced, so the recipes are static under jit: enter the
context inside of the function that is jitted.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

from flax import linen

from loka_jax.recipe import Recipe, get_recipe


class _Overrides:
    def __init__(self, recipes: Mapping[str, Recipe]):
        self.recipes = recipes
        self.unused = set(recipes)


_overrides: contextvars.ContextVar[_Overrides | None] = contextvars.ContextVar(
    "recipes_of_sites", default=None
)


@contextlib.contextmanager
def overriding(recipes: Mapping[str, str | Recipe]) -> Iterator[None]:
    """Lets the sites at some paths follow other recipes than their modules say.

    Variables stay as they are: a recipe with delayed scaling finds a state only where
    the model was initialized with one.

    Args:
        recipes: by path, as `list_sites` names it.

    Raises:
        ValueError: on leaving, if no site was called at one of the paths.
    """
    overrides = _Overrides({path: as_recipe(r) for path, r in recipes.items()})
    token = _overrides.set(overrides)
    try:
        yield
    finally:
        _overrides.reset(token)
    if overrides.unused:
        raise ValueError(
            f"no site was called at {', '.join(sorted(overrides.unused))}: "
            "`list_sites` names the paths."
        )


def site_recipe(module: linen.Module, recipe: str | Recipe) -> Recipe:
    """Returns the recipe that a site follows.

    Args:
        module: of the site.
        recipe: that it was made with.
    """
    overrides, path = _overrides.get(), "/".join(module.path)
    if overrides is None or path not in overrides.recipes:
        return as_recipe(recipe)
    overrides.unused.discard(path)
    return overrides.recipes[path]


def as_recipe(recipe: str | Recipe) -> Recipe:
    """Returns the recipe of that name, or the recipe itself."""
    return get_recipe(recipe) if isinstance(recipe, str) else recipe
