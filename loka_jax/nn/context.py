"""Settings for the sites of a model, made from outside while it is traced.

    with overriding({"top_mlp/dense_1": "bf16", "top_mlp/dense_0": choice}):
        logits = model.apply(variables, x)

The context is static under jit: enter it inside of the function that is jitted, or give
jit a `Planned` model. JAX's caches know of it: what was traced under other settings, a
layer under `linen.jit`, say, is traced again.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping

import jax

from loka_jax.ops.device import Device, local_device
from loka_jax.ops.plan import KernelPlan, resolve, resolve_served
from loka_jax.ops.tap import Observer
from loka_jax.recipe import Recipe, get_recipe
from loka_jax.site import Choice, Provider, SiteSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteContext:
    """The settings for the sites of a model.

    Attributes:
        choices: by path: a choice, or a recipe that leaves the provider to the module.
        is_listing: sites leave marks in the program, see `list_sites`.
        device: that kernels are planned for; JAX's default device if None.
        called: paths of the sites that were called.
        scales_initialized: all delayed scales are initialized, whatever recipes say.
        recipe: of the sites of conversions to which nobody gave one.
        sees_blocks: blocks tell how large their outputs are, see `block_outputs`.
    """

    choices: Mapping[str, str | Recipe | Choice] = dataclasses.field(
        default_factory=dict
    )
    observer: Observer | None = None
    is_listing: bool = False
    device: Device | None = None
    called: set[str] = dataclasses.field(default_factory=set)
    scales_initialized: bool = False
    recipe: str | Recipe | None = None
    sees_blocks: bool = False

    def plan(
        self,
        path: str,
        spec: SiteSpec,
        recipe: str | Recipe | Choice,
        implementation: Provider | None,
    ) -> KernelPlan:
        """Returns the plan of a site.

        Args:
            recipe: of the module, or its choice, which then names the provider.
            implementation: provider of the module; None for Pallas kernels where they
                serve the site on this device, and else XLA. A choice of "group" holds
                where "group" is asked for; elsewhere the site runs by XLA.
        """
        self.called.add(path)
        choice = self.choices.get(path, recipe)
        device = self.device or local_device()
        if isinstance(choice, Choice):
            is_alone = choice.provider == "group" and implementation != "group"
            implementation = "xla" if is_alone else choice.provider
        recipe = self.recipe_of(path, recipe)
        if self.scales_initialized:
            recipe = dataclasses.replace(recipe, scales_initialized=True)
        if implementation is None:
            return resolve_served(spec, recipe, device)
        return resolve(spec, Choice(implementation, recipe), device)

    def recipe_of(self, path: str, recipe: str | Recipe | Choice) -> Recipe:
        """Returns the recipe of a site, given that of its module, or its choice."""
        choice = self.choices.get(path, recipe)
        return as_recipe(choice.recipe if isinstance(choice, Choice) else choice)

    @property
    def settings(self) -> tuple[Hashable, ...]:
        """All that programs depend on."""
        choices = frozenset(self.choices.items())
        seen = (self.observer, self.is_listing, self.device, self.scales_initialized)
        return (choices, *seen, self.recipe, self.sees_blocks)


_PLAIN = SiteContext()
_context: contextvars.ContextVar[SiteContext | None] = contextvars.ContextVar(
    "site_context", default=None
)
# A part of the keys of JAX's caches of programs.
_settings = jax.make_user_context(None)


@functools.cache
def _key(settings: tuple[Hashable, ...]) -> object:
    """Returns an object for these settings, which JAX hashes at each call."""
    return object()


@functools.cache
def _called_paths(choices: frozenset) -> set[str]:
    """Returns the paths called under these choices, in this call or an earlier one.

    JAX does not trace again what it has in a cache.
    """
    return set()


def current() -> SiteContext:
    """Returns the context that modules are traced in."""
    return _context.get() or _PLAIN


@contextlib.contextmanager
def site_context(**changes) -> Iterator[SiteContext]:
    """Changes some attributes of the `SiteContext` for the sites called inside."""
    context = dataclasses.replace(current(), **changes)
    is_plain = context.settings == _PLAIN.settings
    token = _context.set(context)
    try:
        with _settings(None if is_plain else _key(context.settings)):
            yield context
    finally:
        _context.reset(token)


@contextlib.contextmanager
def overriding(choices: Mapping[str, str | Recipe | Choice]) -> Iterator[None]:
    """Replaces the recipes, or choices, of the sites at some paths.

    Variables stay as they are: a recipe with delayed scaling has a state only where the
    model was initialized with one.

    Args:
        choices: by path, as `list_sites` names it; a recipe leaves the provider to the
            module.

    Raises:
        ValueError: on leaving, if no site was ever called at one of the paths under
            these choices.
    """
    called = _called_paths(frozenset(choices.items()))
    with site_context(choices=choices, called=called):
        yield
    unused = sorted(set(choices) - called)
    if unused:
        raise ValueError(
            f"no site was called at {', '.join(unused)}: `list_sites` names the paths."
        )


def probing(observer: Observer | None) -> contextlib.AbstractContextManager:
    """Lets an observer see the sites that are called inside.

    Args:
        observer: a `ProbeConfig` for statistics, or a `Capture` for the operands
            themselves, which needs variables initialized with as many rows; None
            observes nothing.
    """
    return site_context(observer=observer)


def as_recipe(recipe: str | Recipe) -> Recipe:
    """Returns the recipe of that name, or the recipe itself."""
    return get_recipe(recipe) if isinstance(recipe, str) else recipe
