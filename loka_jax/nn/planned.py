"""A model with a choice for each of its sites."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.typing import DTypeLike

from loka_jax.nn.context import as_recipe, current, overriding, site_context
from loka_jax.site import Choice


@runtime_checkable
class Model(Protocol):
    """A model as a training step takes it: a Flax module, planned, or converted."""

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's variables."""
        ...

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output."""
        ...


@dataclasses.dataclass(frozen=True)
class Planned:
    """A model with choices for its sites; used as the model itself is.

    Attributes:
        model: a Flax module, or a `Converted` one; its recipe holds for sites without a
            choice.
        choices: pairs of path and choice, so that the model is hashable.
        scales_initialized: all delayed scales are set, those of sites deep inside of
            the model, too. Who sets them says so: a run after its first steps, or
            `dispatch.adopt`.
    """

    model: Any
    choices: tuple[tuple[str, Choice], ...] = ()
    scales_initialized: bool = False

    @property
    def is_delayed(self) -> bool:
        """True if scales of sites come from earlier steps.

        As far as the choices and the model's own `recipe` tell.
        """
        recipes = [choice.recipe for _, choice in self.choices]
        recipe = getattr(self.model, "recipe", None)
        if recipe is not None:
            recipes.append(as_recipe(recipe))
        return any(recipe.is_delayed for recipe in recipes)

    @property
    def compute_dtype(self) -> DTypeLike:
        """The model's compute dtype; float32 if it has none."""
        return getattr(self.model, "compute_dtype", jnp.float32)

    def by_xla(self) -> "Planned":
        """Returns the model with the same recipes and variables, run by XLA alone."""
        choices = tuple(
            (path, Choice("xla", choice.recipe)) for path, choice in self.choices
        )
        model = self.model
        if hasattr(model, "implementation"):
            model = model.clone(implementation="xla")
        return dataclasses.replace(self, model=model, choices=choices)

    def init(self, *args, **kwargs):
        """Returns the model's variables."""
        with self._planning():
            return self.model.init(*args, **kwargs)

    def apply(self, *args, **kwargs):
        """Returns the output of the model's `apply`."""
        with self._planning():
            return self.model.apply(*args, **kwargs)

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        initialized = self.scales_initialized or current().scales_initialized
        with site_context(scales_initialized=initialized):
            with overriding(dict(self.choices)):
                yield
