"""What runs for a site: a provider of kernels, and a recipe for each product."""

import dataclasses
import functools
from typing import Literal, get_args

from loka_jax.recipe import RECIPES, ROLES, Recipe, get_recipe

Provider = Literal["xla", "pallas", "triton"]
PROVIDERS: tuple[Provider, ...] = get_args(Provider)


@dataclasses.dataclass(frozen=True)
class Choice:
    """What runs for a site; hashable, with a name that can be read back.

    Attributes:
        provider: of the kernels, where they serve; XLA does what they leave.
        recipe: of the whole site, composed of those of its products.
    """

    provider: Provider
    recipe: Recipe

    @property
    def is_fp8(self) -> bool:
        """True if any product is in FP8."""
        return any(self.recipe.gemm(role) is not None for role in ROLES)

    @property
    def name(self) -> str:
        """Provider and recipe: what `parse` reads."""
        return f"{self.provider} {self.recipe.name}"

    def with_initialized_scales(self) -> "Choice":
        """Returns the choice for delayed scales that are known to be set."""
        recipe = dataclasses.replace(self.recipe, scales_initialized=True)
        return dataclasses.replace(self, recipe=recipe)

    @classmethod
    def parse(cls, name: str) -> "Choice":
        """Returns the choice of a name: "xla bf16", "pallas fp8_rowwise/bf16/bf16".

        Raises:
            ValueError: if it names none.
        """
        provider, _, recipe = name.partition(" ")
        for known in PROVIDERS:
            if provider == known:
                return cls(known, compose(recipe))
        raise ValueError(
            f"{name!r} begins with no provider ({', '.join(PROVIDERS)}): give one and "
            "a recipe, as in 'xla fp8_rowwise'."
        )


@functools.cache
def compose(names: str) -> Recipe:
    """Returns the recipe of a name, or of three for forward, dlhs and drhs.

    The casts of each product are those of its own recipe, "fp8_rowwise/bf16/bf16".

    Raises:
        ValueError: if a name is unknown, or the three do not go together.
    """
    parts = [get_recipe(name) for name in names.split("/")]
    if len(parts) == 1:
        return parts[0]
    if len(parts) != len(ROLES):
        raise ValueError(f"{names!r} names {len(parts)} recipes: give one, or three.")
    if len({part.compute_dtype for part in parts}) > 1:
        raise ValueError(f"the recipes in {names!r} do not compute in one dtype.")
    fwd, dlhs, drhs = parts
    recipe = dataclasses.replace(fwd, name=names, dlhs=dlhs.dlhs, drhs=drhs.drhs)
    for known in RECIPES.values():
        if dataclasses.replace(recipe, name=known.name) == known:
            return known
    return recipe
