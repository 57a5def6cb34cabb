"""What a site in a traced program has of a module: a path and variables."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from loka_jax.recipe import Recipe

# By collection, path of the site and name.
type Key = tuple[str, tuple[str, ...], str]


@dataclasses.dataclass
class Made:
    """Variables that sites asked for and that were not given.

    Attributes:
        variables: by key: how to make one, and how many there are, in scans.
        paths: of all products that can be sites, and of those left.
    """

    variables: dict[Key, tuple[Callable[[], Any], tuple[int, ...]]]
    paths: dict[str, None]

    def values(self) -> Iterator[tuple[Key, Any]]:
        """Yields the variables, stacked where they are of layers in scans."""
        for key, (init, stack) in self.variables.items():
            stacked = functools.partial(_stacked, stack)
            yield key, jax.tree.map(stacked, init())


@dataclasses.dataclass(frozen=True)
class Host:
    """What a site has of a module: its path, recipe and variables.

    Attributes:
        axis_names: none: under `shard_map`, JAX knows which values vary.
    """

    path: tuple[str, ...]
    recipe: str | Recipe
    stack: tuple[int, ...]
    given: dict[Key, Any]
    made: Made | None
    axis_names: tuple[str, ...] = ()

    def is_initializing(self) -> bool:
        """Returns True where variables are made."""
        return self.made is not None

    def is_mutable_collection(self, collection: str) -> bool:
        """Returns True where variables are made."""
        del collection
        return self.made is not None

    def has_variable(self, collection: str, name: str) -> bool:
        """Returns True if the site was given a variable."""
        return (collection, self.path, name) in self.given

    def variable(self, collection: str, name: str, init: Callable[[], Any]) -> Any:
        """Returns a variable of the site, its `value` made where none was given."""
        key = collection, self.path, name
        if key not in self.given and self.made is not None:
            self.made.variables[key] = (init, self.stack)
        return _Value(self.given[key] if key in self.given else init())


@dataclasses.dataclass(frozen=True)
class _Value:
    value: Any


def _stacked(stack: tuple[int, ...], x: Any) -> Any:
    return jnp.broadcast_to(x, (*stack, *jnp.shape(x)))
