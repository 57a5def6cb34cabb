"""What a conversion does to the traced program of a model or function."""

import contextlib
import fnmatch
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from loka_jax.chosen import Chosen
from loka_jax.nn.by_default import chosen_by_default
from loka_jax.nn.context import current, site_context
from loka_jax.nn.found_groups import find
from loka_jax.nn.host import Key, Made
from loka_jax.nn.observed import PROBE, is_of_site
from loka_jax.nn.program import Origin, read_program, trace
from loka_jax.nn.rewrite import run_program
from loka_jax.nn.scale_state import read_together
from loka_jax.recipe import Recipe
from loka_jax.site import BF16

# The collections of sites.
OURS = OVERWRITE_WITH_GRADIENT, PROBE


def run_converted(
    call: Callable[[Any], Any],
    variables: Any,
    rules: "Rules",
    place: tuple[str, ...],
    made: Made | None,
) -> Any:
    """Returns what a function of variables returns, its products as sites.

    Args:
        place: the path of the model in one that it is a part of.
    """

    def origin(path: tuple[str, ...]) -> Origin | None:
        first, *rest = path
        return None if first in OURS else Origin((first, *place, *rest))

    return run_traced(call, variables, origin, rules, _given(variables, place), made)


def run_traced(
    call: Callable[[Any], Any],
    variables: Any,
    origin: Callable[[tuple[str, ...]], Origin | None],
    rules: "Rules",
    given: dict[Key, Any],
    made: Made | None,
) -> Any:
    """Returns what a function of variables returns, its products as sites.

    Args:
        origin: of the variable at a path; None for one that is data.
        given: the variables of sites.
    """
    closed, paths, rebuild = trace(call, variables)
    origins = [*(None for _ in closed.consts), *map(origin, paths)]
    program = read_program(closed.jaxpr, origins, closed.consts)
    find(program, rules.why_left)
    rules.chosen = chosen_by_default(program, rules.has_recipe)
    arguments = [*closed.consts, *jax.tree.leaves(variables)]
    with _choosing(rules.chosen):
        given = read_together(given, rules.recipe_here)
        return rebuild(run_program(program, arguments, rules, given, made))


def _choosing(chosen: Mapping[str, Chosen]) -> contextlib.AbstractContextManager:
    choices = {x: own.choice for x, own in chosen.items() if own.choice is not None}
    if not choices:
        return contextlib.nullcontext()
    return site_context(choices={**choices, **current().choices})


def _given(variables: Any, place: tuple[str, ...]) -> dict[Key, Any]:
    """Returns the variables of sites."""
    given: dict[Key, Any] = {}
    for collection in OURS:
        leaves = jax.tree_util.tree_leaves_with_path(
            variables.get(collection, {}), is_leaf=is_of_site
        )
        for keys, leaf in leaves:
            *path, name = (jax.tree_util.keystr((k,), simple=True) for k in keys)
            given[collection, (*place, *path), name] = leaf
    return given


class Rules:
    """What conversions do with the sites of a model.

    Attributes:
        seen: paths of all that can be sites, in order.
        chosen: what runs at sites for which nobody chose, by path.
    """

    def __init__(self, conversions: tuple[Any, ...], place: tuple[str, ...] = ()):
        self.conversions = conversions
        self.prefix = "".join(f"{part}/" for part in place)
        self.seen: dict[str, None] = {}
        self.chosen: Mapping[str, Chosen] = {}

    def recipe(self, path: str) -> str | Recipe:
        """Returns the recipe of a site that is converted; bfloat16 without one."""
        return self._recipe(path) or BF16.recipe

    def recipe_here(self, path: str) -> Recipe:
        """Returns the recipe of a site under the settings from outside."""
        return current().recipe_of(path, self.recipe(path))

    def has_recipe(self, path: str) -> bool:
        """Returns True if somebody gave a site a recipe."""
        return self._recipe(path) is not None

    def _recipe(self, path: str) -> str | Recipe | None:
        path = self.own(path)
        own = [x for x in self.conversions if _why_left(x, path, path) is None]
        return next((x.recipe for x in own if x.recipe is not None), current().recipe)

    def why_left(self, path: str, scope: str) -> str | None:
        """Returns why a site is left as it is, or None."""
        path = self.own(path)
        self.seen[path] = None
        place = scope.partition("/")[2]
        reasons = [_why_left(one, path, place) for one in self.conversions]
        return None if None in reasons else reasons[-1]

    def own(self, path: str) -> str:
        """Returns the path of a site in the converted model itself."""
        return path.removeprefix(self.prefix)

    def check_patterns(self, parameters: Any) -> None:
        """Refuses patterns that match no site.

        Args:
            parameters: of the model, of which a call may use a part only.

        Raises:
            ValueError: naming the patterns and the sites.
        """
        one, paths = self.conversions[0], {*self.seen, *_owners(parameters)}
        if not paths:
            raise ValueError(
                f"{_name(one.written)} has no product of data and a parameter: "
                "there is nothing to convert."
            )
        for pattern in (*one.only, *one.skip):
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                raise ValueError(
                    f"pattern {pattern!r} matches no dense layer: there are "
                    f"{', '.join(self.seen)}."
                )


def _why_left(one: Any, path: str, place: str) -> str | None:
    for pattern in one.skip:
        if any(fnmatch.fnmatchcase(x, pattern) for x in (path, place)):
            return f"skip={pattern!r}"
    if not any(fnmatch.fnmatchcase(x, p) for x in (path, place) for p in one.only):
        return f"not in only={', '.join(one.only)}"
    return None


def with_made(variables: dict, made: Made, place: tuple[str, ...] = ()) -> dict:
    """Returns variables with those of sites.

    Args:
        place: the path of the model in one that it is a part of.
    """
    variables = {**variables}
    for (collection, path, name), value in made.values():
        inner = variables[collection] = {**variables.get(collection, {})}
        for part in path[len(place) :]:
            inner[part] = {**inner.get(part, {})}
            inner = inner[part]
        inner[name] = value
    return variables


def _name(model: Any) -> str:
    return getattr(model, "__name__", type(model).__name__)


def _owners(parameters: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the paths of modules with a kernel."""
    if "kernel" in parameters:
        yield "/".join(path)
    for name, part in parameters.items():
        if isinstance(part, Mapping):
            yield from _owners(part, (*path, str(name)))
