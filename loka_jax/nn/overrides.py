"""What runs at single sites, given from outside of a model.

    with overriding({"top_mlp/dense_1": "bf16", "top_mlp/dense_0": choice}):
        logits = model.apply(variables, x)

Modules look while they are traced, so it is static under jit: enter the context inside
of the function that is jitted, or give jit a `Planned` model.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from flax import linen
from jax.typing import DTypeLike

from loka_jax.ops.plan import Implementation
from loka_jax.recipe import INITIALIZED, Recipe, get_recipe
from loka_jax.site import Choice


class _Overrides:
    def __init__(self, choices: Mapping[str, "str | Recipe | Choice"]):
        self.choices = choices
        self.unused = set(choices)

    def of(self, path: str) -> tuple[Recipe, Implementation | None] | None:
        if path not in self.choices:
            return None
        choice = self.choices[path]
        if isinstance(choice, Choice):
            return choice.recipe, choice.provider
        return as_recipe(choice), None


_overrides: contextvars.ContextVar[_Overrides | None] = contextvars.ContextVar(
    "choices_of_sites", default=None
)


@contextlib.contextmanager
def overriding(choices: Mapping[str, str | Recipe | Choice]) -> Iterator[None]:
    """Lets the sites at some paths run otherwise than their modules say.

    Variables stay as they are: a recipe with delayed scaling finds a state only where
    the model was initialized with one.

    Args:
        choices: by path, as `list_sites` names it; a recipe leaves the kernels to the
            module.

    Raises:
        ValueError: on leaving, if no site was called at one of the paths.
    """
    overrides = _Overrides(choices)
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


def site_choice(
    module: linen.Module,
    recipe: str | Recipe,
    implementation: Implementation | None = None,
) -> tuple[Recipe, Implementation | None]:
    """Returns the recipe that a site follows, and who runs it.

    Args:
        module: of the site.
        recipe, implementation: that it was made with.
    """
    overrides, path = _overrides.get(), "/".join(module.path)
    if overrides is not None:
        overrides.unused.discard(path)
    return choice_at(path, recipe, implementation)


def choice_at(
    path: str, recipe: str | Recipe, implementation: Implementation | None
) -> tuple[Recipe, Implementation | None]:
    """Returns what `site_choice` will, for a site that is not called yet."""
    overrides = _overrides.get()
    found = None if overrides is None else overrides.of(path)
    if found is None:
        return as_recipe(recipe), implementation
    recipe, chosen = found
    return recipe, implementation if chosen is None else chosen


def as_recipe(recipe: str | Recipe) -> Recipe:
    """Returns the recipe of that name, or the recipe itself."""
    return get_recipe(recipe) if isinstance(recipe, str) else recipe


@dataclasses.dataclass(frozen=True)
class Planned:
    """A model and what runs at its sites; used as the model itself is.

    Attributes:
        model: with the name of a recipe, for sites that no choice is about.
        choices: by path; hashable, as pairs.
        scales_initialized: all delayed scales are known to be set.
    """

    model: linen.Module
    choices: tuple[tuple[str, Choice], ...] = ()
    scales_initialized: bool = False

    @property
    def is_delayed(self) -> bool:
        """True if the scales of any site come from earlier steps."""
        recipes = [choice.recipe for _, choice in self.choices]
        own = getattr(self.model, "recipe", None)
        if own is not None:
            recipes.append(as_recipe(own))
        return any(recipe.is_delayed for recipe in recipes)

    @property
    def compute_dtype(self) -> DTypeLike:
        """What the model casts its inputs to, if it says so; else float32."""
        return getattr(self.model, "compute_dtype", jnp.float32)

    def with_initialized_scales(self) -> "Planned":
        """Returns the same for states whose delayed scales are known to be set."""
        return dataclasses.replace(self, scales_initialized=True)

    def by_xla(self) -> "Planned":
        """Returns the same recipes without kernels: its variables are the same."""
        choices = tuple(
            (path, Choice("xla", choice.recipe)) for path, choice in self.choices
        )
        model = self.model
        if hasattr(model, "implementation"):
            model = model.clone(implementation="xla")
        return dataclasses.replace(self, model=model, choices=choices)

    def init(self, *args, **kwargs):
        """Returns the model's variables."""
        with overriding(self._choices):
            return self._model.init(*args, **kwargs)

    def apply(self, *args, **kwargs):
        """Returns what the model does with its variables and arguments."""
        with overriding(self._choices):
            return self._model.apply(*args, **kwargs)

    @property
    def _choices(self) -> dict[str, Choice]:
        if not self.scales_initialized:
            return dict(self.choices)
        return {path: choice.with_initialized_scales() for path, choice in self.choices}

    @property
    def _model(self) -> linen.Module:
        own = getattr(self.model, "recipe", None)
        if not self.scales_initialized or own is None:
            return self.model
        return self.model.clone(recipe=own + INITIALIZED)


# What a training step takes.
type Model = linen.Module | Planned
