"""Recipes by name, as sites run them once their delayed scales are set."""

import dataclasses

from loka_jax.recipe import Recipe, get_recipe

INITIALIZED = ":initialized"  # a suffix of the name


def recipe_of(name: str) -> Recipe:
    """Returns the recipe of a name; with the suffix that of steps after the first."""
    base = name.removesuffix(INITIALIZED)
    return dataclasses.replace(get_recipe(base), scales_initialized=base != name)
