"""Functions of parameters with their products as sites."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from loka_jax.nn.context import current
from loka_jax.nn.conversion import OURS, Rules, run_converted, with_made
from loka_jax.nn.host import Made
from loka_jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class ConvertedFunction:
    """A function of a dictionary of parameters with its products as sites.

    Its first argument may hold the variables of sites, too, as `init` returns them.
    """

    written: Callable[..., Any]
    recipe: str | Recipe | None
    only: tuple[str, ...]
    skip: tuple[str, ...]

    @property
    def conversions(self) -> tuple["ConvertedFunction", ...]:
        """Itself."""
        return (self,)

    def init(self, key: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the parameters with the variables of sites; reads no key."""
        del key
        made = Made({}, {})

        def run(parameters):
            return self._call(parameters, args, kwargs, made)

        if current().is_listing:
            run(parameters)
        else:
            jax.eval_shape(lambda x: (run(x), ())[1], parameters)
        return with_made({**parameters}, made)

    def __call__(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns what the function returns."""
        return self._call(parameters, args, kwargs)

    def _call(self, parameters: Any, args, kwargs, made: Made | None = None) -> Any:
        own = {name: x for name, x in parameters.items() if name not in OURS}
        ours = {name: parameters[name] for name in OURS if name in parameters}
        rules = Rules(self.conversions)

        def call(variables):
            return self.written(variables["params"], *args, **kwargs)

        out = run_converted(call, {"params": own, **ours}, rules, (), made)
        rules.check_patterns({})
        return out
