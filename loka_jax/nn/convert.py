"""Any Flax Linen model with its products as sites, without touching its code.

    model = nn.convert(your_model, recipe="fp8_rowwise", skip="head")
    variables = model.init(key, x)
    y = model.apply(variables, x)

The model is traced as written, and its program run with other products. So every
product of data and a weight is a site, by a layer or not: `x @ self.param(...)`, an
einsum, `Embed.attend`. Its path is that of the weight. Norms and activations that
nothing else reads are part of it, and products that read each other are groups.

Parameters keep their names and dtypes, and checkpoints go either way. A recipe with
delayed scaling adds its collection beside the parameters, also for layers under
`nn.scan`, `nn.vmap` or `nn.remat`, which need not know of it.
"""

import dataclasses
import fnmatch
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.core import unfreeze
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from loka_jax.nn.context import as_recipe, current
from loka_jax.nn.observed import PROBE, is_of_site
from loka_jax.nn.program import Origin, read_program, trace
from loka_jax.nn.rewrite import Key, Made, run_program
from loka_jax.recipe import Recipe

if TYPE_CHECKING:
    from flax import nnx


@typing.overload
def convert(model: linen.Module, *, recipe=..., only=..., skip=...) -> "Converted": ...


@typing.overload
def convert[M: "nnx.Module"](model: M, *, recipe=..., only=..., skip=...) -> M: ...


def convert(
    model: Any,
    *,
    recipe: str | Recipe = "fp8_tensorwise",
    only: str | tuple[str, ...] = "*",
    skip: str | tuple[str, ...] = (),
) -> Any:
    """Returns a model that runs the products of a Flax model as sites.

    Args:
        model: any Linen module, in which our own modules keep their recipes; or any NNX
            module, of which a copy is returned, see `convert_nnx`.
        only: patterns of paths ("tower/*") of the sites to convert, or of the modules
            that they are in.
        skip: patterns of what to leave as it is, though in `only`.

    Raises:
        ValueError: if there is no recipe of that name; if what is given is no model,
            but its class, say; if a pattern matches no site, of a Linen model when it
            is called.
    """
    as_recipe(recipe)
    if isinstance(model, type):
        raise ValueError(f"{model.__name__} is a class: give a model, an instance.")
    from flax import nnx  # a tenth of a second, which not all need

    if isinstance(model, nnx.Module):
        from loka_jax.nn.nnx_convert import convert_nnx

        return convert_nnx(model, recipe, _patterns(only), _patterns(skip))
    if not hasattr(model, "apply"):
        raise ValueError(f"{_repr(model)} is no Flax model: give {_within(model)}.")
    options = _patterns(only), _patterns(skip)
    return Converted(Written(model), recipe, *options, parent=None)


@dataclasses.dataclass(frozen=True)
class Written:
    """A model as written; no module of Flax, which would make variables for it."""

    model: Any


class Converted(linen.Module):
    """A model with its products as sites; used as the model itself is.

    It may be a part of another model. Attributes that are not its own are the model's.
    """

    of: Written
    recipe: str | Recipe = "fp8_tensorwise"
    only: tuple[str, ...] = ("*",)
    skip: tuple[str, ...] = ()

    @linen.nowrap
    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the model as written; its methods run converted."""
        if name.startswith("_") or name in ("of", "scope", "name", "parent"):
            raise AttributeError(name)  # while a module is made or copied
        is_method = callable(getattr(type(self.written), name, None))
        if is_method and self._bound is not None:
            return functools.partial(self._call_within, name)
        return getattr(self.of.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns, within another one or bound."""
        return self._call_within("__call__", *args, **kwargs)

    @linen.nowrap
    def clone(self, **changes: Any) -> Any:
        """Returns the model with some attributes changed, its own or as written."""
        own = {field.name for field in dataclasses.fields(self)}
        flax = {x: changes.pop(x) for x in [*changes] if x in own or x.startswith("_")}
        if changes:
            flax["of"] = Written(self.of.model.clone(**changes))
        return super().clone(**flax)

    @linen.nowrap
    def tabulate(self, *args: Any, **kwargs: Any) -> str:
        """Returns the table of the model as written."""
        return self.written.tabulate(*args, **kwargs)

    @linen.nowrap
    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's variables."""
        return self._init(args, kwargs)[1]

    @linen.nowrap
    def init_with_output(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Returns the model's output and its variables."""
        y, variables = self._init(args, kwargs, has_output=True)
        return y, variables

    @linen.nowrap
    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the model's `apply`."""
        return self._apply(variables, args, kwargs)

    @property
    def written(self) -> linen.Module:
        """The model as written, within all conversions, in no other model."""
        inner = self.of.model
        if isinstance(inner, Converted):
            return inner.written
        return inner if inner.parent is None else inner.clone(parent=None, name=None)

    @property
    def conversions(self) -> "tuple[Converted, ...]":
        """All conversions, the outermost first."""
        inner = self.of.model
        return (self, *(inner.conversions if isinstance(inner, Converted) else ()))

    @linen.nowrap
    def _init(self, args: tuple, kwargs: dict, *, has_output=False) -> tuple[Any, Any]:
        """Returns the output and all variables, those of sites by what they ask for."""
        rngs, *inputs = args if args else (kwargs["rngs"],)
        rngs = rngs if isinstance(rngs, Mapping) else {"params": rngs}
        variables = unfreeze(self.written.init(*args, **kwargs))
        own = {name: x for name, x in kwargs.items() if name not in ("rngs", "mutable")}
        own |= {"rngs": rngs, "mutable": True}
        made = Made({}, {})

        def run(variables):
            return self._apply(variables, tuple(inputs), own, made)[0]

        # The marks of sites stay in the program of those who list them.
        if has_output or current().is_listing:
            return run(variables), self._with_made(variables, made)
        jax.eval_shape(lambda variables: (run(variables), ())[1], variables)
        return None, self._with_made(variables, made)

    @linen.nowrap
    def _apply(self, variables: Any, args, kwargs, made: Made | None = None) -> Any:
        rules = _Rules(self)

        def call(variables):
            return self.written.apply(variables, *args, **kwargs)

        out = run_converted(call, variables, rules, self._place, made)
        if _is_whole_call(kwargs.get("method")):
            rules.check_patterns(variables.get("params", {}))
        return out

    @linen.nowrap
    def _call_within(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method in a module's scope, whose variables are the model's."""
        module = self._bound
        if module is None:
            raise ValueError(
                "a converted model is called by `apply`, or within another."
            )
        scope = module.scope
        rngs = {name: module.make_rng(name) for name in scope.rngs}
        options = kwargs | {"method": method}
        variables = scope.variables()
        if module.is_initializing() and not variables.get("params"):
            y, new = self._init((rngs, *args), options, has_output=True)
        elif scope.mutable is False:
            return self._apply(variables, args, options | {"rngs": rngs})
        else:
            options |= {"rngs": rngs, "mutable": scope.mutable}
            y, new = self._apply(variables, args, options)
        for collection, values in new.items():
            for name, value in values.items():
                scope.put_variable(collection, name, value)
        return y

    @property
    def _bound(self) -> Any:
        """The module whose scope is that of the model, within another; else None.

        In a compact method the model as written has a name and a place already.
        """
        return next((x for x in (self, self.of.model) if x.scope is not None), None)

    @property
    def _place(self) -> tuple[str, ...]:
        """Its path in the model that it is a part of."""
        return () if self._bound is None else tuple(self._bound.path)

    @linen.nowrap
    def _with_made(self, variables: dict, made: Made) -> dict:
        """Returns variables with those of sites."""
        variables, at = {**variables}, len(self._place)
        for (collection, path, name), (init, stack) in made.variables.items():
            place = variables[collection] = {**variables.get(collection, {})}
            for part in path[at:]:
                place[part] = {**place.get(part, {})}
                place = place[part]
            place[name] = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (*stack, *jnp.shape(x))),  # noqa: B023
                init(),
            )
        return variables


def run_converted(
    call: Callable[[Any], Any],
    variables: Any,
    rules: "_Rules",
    place: tuple[str, ...],
    made: Made | None,
) -> Any:
    """Returns what a function of variables returns, its products as sites.

    Args:
        place: the path of the model in one that it is a part of.
    """
    closed, paths, rebuild = trace(call, variables)
    ours = OVERWRITE_WITH_GRADIENT, PROBE
    origins = [
        None if first in ours else Origin((first, *place, *rest))
        for first, *rest in paths
    ]
    program = read_program(closed.jaxpr, [*(None for _ in closed.consts), *origins])
    arguments = [*closed.consts, *jax.tree.leaves(variables)]
    given = _given(variables, place)
    return rebuild(run_program(program, arguments, rules, given, made))


def _given(variables: Any, place: tuple[str, ...]) -> dict[Key, Any]:
    """Returns the variables of sites."""
    given: dict[Key, Any] = {}
    for collection in (OVERWRITE_WITH_GRADIENT, PROBE):
        leaves = jax.tree_util.tree_leaves_with_path(
            variables.get(collection, {}), is_leaf=is_of_site
        )
        for keys, leaf in leaves:
            *path, name = (jax.tree_util.keystr((k,), simple=True) for k in keys)
            given[collection, (*place, *path), name] = leaf
    return given


class _Rules:
    """What conversions do with the sites of a model.

    Attributes:
        seen: paths of all that can be sites, in order.
    """

    def __init__(self, converted: Converted):
        self.conversions = converted.conversions
        place = "/".join(converted._place)
        self.prefix = f"{place}/" if place else ""
        self.seen: dict[str, None] = {}

    def recipe(self, path: str) -> str | Recipe:
        """Returns the recipe of a site that is converted."""
        path = self.own(path)
        for one in self.conversions:
            if _why_left(one, path, path) is None:
                return one.recipe
        return self.conversions[-1].recipe

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
                f"{type(one.written).__name__} has no product of data and a parameter: "
                "there is nothing to convert."
            )
        for pattern in (*one.only, *one.skip):
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                raise ValueError(
                    f"pattern {pattern!r} matches no dense layer: there are "
                    f"{', '.join(self.seen)}."
                )


def _why_left(one: Converted, path: str, place: str) -> str | None:
    for pattern in one.skip:
        if any(fnmatch.fnmatchcase(x, pattern) for x in (path, place)):
            return f"skip={pattern!r}"
    if not any(fnmatch.fnmatchcase(x, p) for x in (path, place) for p in one.only):
        return f"not in only={', '.join(one.only)}"
    return None


def _repr(model: Any) -> str:
    """Returns what a value is called in a message, without the arrays in it."""
    text = repr(model)
    return text if len(text) <= 80 else type(model).__name__


def _within(model: Any) -> str:
    """Returns what to give in place of an object, which may be one around a model."""
    from flax import nnx

    for name in ("module", "model", *getattr(model, "__dict__", ())):
        if isinstance(getattr(model, name, None), linen.Module | nnx.Module):
            return f"the model in it, its attribute {name!r}"
    return "a Linen or NNX module"


def _patterns(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _is_whole_call(method: Callable | str | None) -> bool:
    """Returns False for another method than `__call__`: it may call few layers."""
    return method is None or getattr(method, "__name__", method) == "__call__"


def _owners(parameters: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the paths of modules with a kernel."""
    if "kernel" in parameters:
        yield "/".join(path)
    for name, part in parameters.items():
        if isinstance(part, Mapping):
            yield from _owners(part, (*path, name))
