"""Any Flax NNX model with its products as sites, without touching its code.

    model = nn.convert(your_model, x, recipe="fp8_tensorwise_delayed", skip="head")

    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, nn.Fp8State))
    gradients = nnx.grad(loss, argnums=wrt)(model, batch)
    optimizer.update(model, nn.take_scaling(model, gradients))

The converted model is a copy whose modules are of subclasses of their classes. A method
of one that is called from outside is traced as written, as a function of the state, and
its program run with other products, as that of a Linen model. Variables of sites are
attributes beside the weights, which the model as written never sees.
"""

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.core import Tracer

from loka_jax.nn.context import current, site_context
from loka_jax.nn.conversion import Rules, run_traced
from loka_jax.nn.host import Key, Made
from loka_jax.nn.observed import PROBE
from loka_jax.nn.overwriting import next_table
from loka_jax.nn.products import site_path
from loka_jax.nn.program import Origin
from loka_jax.nn.scale_state import SCALES
from loka_jax.recipe import Recipe
from loka_jax.site import Choice

type Path = tuple[Any, ...]


class Fp8State(nnx.Variable):
    """The delayed scales of a site, whose gradient is their next value."""


class ProbeStats(nnx.Variable):
    """What Probe learned of a site; its gradient is what it saw in a batch."""


_NAMES = {Fp8State: (OVERWRITE_WITH_GRADIENT, SCALES), ProbeStats: (PROBE, "stats")}
_ONCE = "call the model once before, outside of jit and grad."


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How the model of a class is converted, with choices of sites by path.

    Attributes:
        scales_initialized: all delayed scales are set.
    """

    written: type
    recipe: str | Recipe | None
    only: tuple[str, ...]
    skip: tuple[str, ...]
    choices: tuple[tuple[str, Choice], ...] = ()
    scales_initialized: bool = False


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a module is in a converted model; the outermost conversion comes first."""

    conversions: tuple[Conversion, ...] = ()
    path: tuple[str, ...] = ()


def convert_nnx(
    model: Any,
    inputs: tuple[Any, ...],
    recipe: str | Recipe | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
) -> Any:
    """Returns a copy of an NNX model that runs its products as sites.

    Parts that are converted already keep their recipes.

    Args:
        inputs: of a call, by which the variables of sites are made; else the first
            call makes them.
        only, skip: patterns of paths, see `convert`.
    """
    model = nnx.clone(model)
    before = _place(model).conversions
    written = _written(type(model)) if before else type(model)
    conversions = (Conversion(written, recipe, only, skip), *before)
    for path, module in _modules(model, before):
        if not before:
            module.__class__ = _subclass(type(module))
        module.nn_place = _Place(conversions, tuple(map(str, path)))
    if inputs:
        _make_variables(model, inputs)
    return model


def with_choices(
    model: Any, choices: Mapping[str, Choice], *, scales_initialized: bool = False
) -> Any:
    """Returns a copy of a converted model whose sites have choices, by path.

    Args:
        scales_initialized: all its delayed scales are set.
    """
    model = nnx.clone(model)
    before = _place(model).conversions
    first = dataclasses.replace(
        before[0],
        choices=tuple(choices.items()),
        scales_initialized=scales_initialized,
    )
    for _, module in _modules(model, before):
        conversions = first, *before[1:]
        module.nn_place = dataclasses.replace(_place(module), conversions=conversions)
    return model


def take_scaling(model: Any, gradients: Any) -> Any:
    """Overwrites a model's FP8 states by their gradients; returns all other gradients.

    The state of a site on which the loss does not depend stays as it was.
    """
    states, rest = nnx.split_state(gradients, Fp8State, ...)
    old = dict(nnx.to_flat_state(nnx.state(model, Fp8State)))
    new = [
        (path, jax.tree.map(next_table, old[path], state))
        for path, state in nnx.to_flat_state(states)
    ]
    nnx.update(model, nnx.from_flat_state(new))
    return rest


def _place(module: Any) -> _Place:
    return getattr(module, "nn_place", _Place())


def _modules(
    model: Any, conversions: tuple[Conversion, ...]
) -> Iterator[tuple[Path, Any]]:
    """Yields the modules of a model that were converted so, () for not at all."""
    for path, module in [*nnx.iter_modules(model, graph=True)]:
        is_list = isinstance(module, nnx.List | nnx.Dict)
        if not is_list and _place(module).conversions == conversions:
            yield path, module


@functools.cache
def _subclass(written: type) -> type:
    """Returns a class by the same name whose methods run converted."""
    body: dict[str, Any] = {
        "__module__": written.__module__,
        "__qualname__": written.__qualname__,
    }
    body["__reduce__"] = lambda self: (_loaded, (written, vars(self)))
    for name in dir(written):
        method = inspect.getattr_static(written, name)
        is_own = method is not inspect.getattr_static(nnx.Module, name, None)
        is_method = callable(method) and hasattr(method, "__get__")
        is_method &= not isinstance(method, staticmethod)
        if is_own and is_method and (name == "__call__" or not name.startswith("_")):
            body[name] = _converted(method)
    is_pytree = written._pytree__is_pytree  # noqa: SLF001 (an argument of classes)
    return type(written)(written.__name__, (written,), body, pytree=is_pytree)


def _loaded(written: type, attributes: dict[str, Any]) -> Any:
    """Returns a converted module of a pickle, whose class has the name of another."""
    module = object.__new__(_subclass(written))
    vars(module).update(attributes)
    return module


def _written(converted: type) -> Any:
    """Returns the class that `_subclass` got."""
    return converted.__mro__[1]


def _converted(method: Any) -> Any:
    @functools.wraps(method)
    def run(self, *args, **kwargs):
        out, made = _run(self, method, args, kwargs)
        if made.variables and not current().is_listing:
            _attach(self, made)
        return out

    return run


def _make_variables(model: Any, inputs: tuple[Any, ...]) -> None:
    """Makes the variables of sites by an abstract call.

    Raises:
        ValueError: if the model is not called itself, but methods of it.
    """
    if not callable(model):
        raise ValueError(
            f"{type(model).__name__} has no __call__ that could take inputs: give "
            "`convert` none, and call a method once before training."
        )
    graph, state = nnx.split(model, graph=True)
    leaves, tree = jax.tree.flatten(inputs)
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "dtype")}
    method, made = _written(type(model)).__call__, []

    def run(state, arrays):
        args = tree.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        made.append(_run(nnx.merge(graph, state), method, args, {})[1])

    jax.eval_shape(run, state, arrays)
    _attach(model, made[-1])


@dataclasses.dataclass(frozen=True)
class _At:
    """Stands for a module or variable of the model that a method returns."""

    path: Path


def _run(model: Any, method: Any, args: tuple, kwargs: dict) -> tuple[Any, Made]:
    """Returns what a method returns, and the variables that sites lacked.

    What it changes is changed in the modules themselves.
    """
    place = _place(model)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    whole = model, [x for x in leaves if _is_node(x)]
    graph, state = nnx.split(_as_written(whole), graph=True)
    state = jax.tree.map(_as_array, state)
    arrays, of_state = jax.tree.flatten(state)
    ends = []

    def call(arrays):
        own, nodes = inner = nnx.merge(graph, of_state.unflatten(arrays))
        rest = iter(nodes)
        given = [next(rest) if _is_node(x) else x for x in leaves]
        args, kwargs = tree.unflatten(given)
        with jax.named_scope("/".join((type(own).__name__, *place.path))):
            out = method(own, *args, **kwargs)
        known = {id(x): _At(p) for p, x in _nodes(inner).items() if _is_node(x)}
        out = jax.tree.map(lambda x: known.get(id(x), x), out, is_leaf=_is_node)
        end, new = nnx.split(inner, graph=True)
        ends.append(end)
        return out, new

    origins = [
        _origin(place, path, array)
        for path, value in nnx.to_flat_state(state)
        for array in jax.tree.leaves(value)
    ]
    rules, made = Rules(place.conversions), Made({}, {})
    own = functools.partial(_at, origins), rules, site_variables(model), made
    first = place.conversions[0]
    choices = {**dict(first.choices), **current().choices}
    initialized = first.scales_initialized or current().scales_initialized
    with site_context(choices=choices, scales_initialized=initialized):
        out, new = run_traced(call, arrays, *own)
    if method.__name__ == "__call__" and not place.path:
        rules.check_patterns(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    _carry_over(whole, nnx.merge(ends[-1], new), state)
    nodes = _nodes(whole)
    out = jax.tree.map(lambda x: nodes[x.path] if isinstance(x, _At) else x, out)
    return out, made


def _as_written(whole: tuple[Any, list]) -> tuple[Any, list]:
    """Returns a copy of a converted module, and of others, as they were written."""
    copy = nnx.clone(whole, graph=True)
    for _, module in _modules(copy[0], _place(whole[0]).conversions):
        module.__class__ = _written(type(module))
        for name in [name for name, x in vars(module).items() if _is_ours(x)]:
            delattr(module, name)
    return copy


def _at(origins: list[Origin | None], path: tuple[str, ...]) -> Origin | None:
    return origins[int(path[0])]


def _origin(place: _Place, path: Path, array: Any) -> Origin | None:
    """Returns the origin of an array of the model, which comes first; else None."""
    if path[0] != 0 or not jnp.issubdtype(array.dtype, jnp.floating):
        return None
    return Origin(("params", *place.path, *map(str, path[1:])))


def _site(place: _Place, path: Path) -> tuple[str, ...]:
    """Returns the path of the site of a weight of a module."""
    return site_path(("params", *place.path, *map(str, path)))


def site_variables(model: Any) -> dict[Key, Any]:
    """Returns the variables of the sites of a converted model."""
    place, given = _place(model), {}
    for path, module in _modules(model, place.conversions):
        for value in vars(module).values():
            if isinstance(value, Fp8State | ProbeStats):
                collection, name = _NAMES[type(value)]
                site = _site(place, (*path, *value.of))
                given[collection, site, name] = value.get_value()
    return given


def _attach(model: Any, made: Made) -> None:
    """Attaches variables that sites lacked to the modules of their weights.

    Raises:
        ValueError: where that cannot be: those of Probe in any trace, as a gradient
            that is being taken would not have them; others where NNX refuses it.
    """
    place = _place(model)
    modules = dict(_modules(model, place.conversions))
    weights, _ = zip(*nnx.to_flat_state(nnx.state(model)), strict=True)
    of_site = {_site(place, path): path for path in reversed(weights)}
    for (collection, site, name), value in made.values():
        kind = Fp8State if collection == OVERWRITE_WITH_GRADIENT else ProbeStats
        if kind is ProbeStats and isinstance(jnp.zeros(()), Tracer):
            raise ValueError(f"Probe's statistics are made by a call: {_ONCE}")
        path = of_site[site]
        end = next(i for i in range(len(path), -1, -1) if path[:i] in modules)
        of = tuple(map(str, path[end:]))
        try:
            setattr(modules[path[:end]], "_".join((*of, name)), kind(value, of=of))
        except TraceContextError as error:
            where = "/".join(site)
            raise ValueError(
                f"the delayed scales of site {where!r} cannot be made here: {_ONCE}"
            ) from error


def _as_array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _is_ours(x: Any) -> bool:
    return isinstance(x, Fp8State | ProbeStats | _Place)


def _nodes(whole: Any) -> dict[Path, Any]:
    """Returns all that the model as written has by path, static values too."""
    return {
        path: x
        for path, x in nnx.iter_graph(whole, graph=True)
        if not (path and str(path[-1]).startswith("_pytree__")) and not _is_ours(x)
    }


def _carry_over(whole: Any, new: Any, state: Any) -> None:
    """Makes the changes of a copy in the modules themselves.

    What did not change stays untouched, as it may belong to another trace.

    Args:
        state: of the copy before it was changed.
    """
    before, after = _nodes(whole), _nodes(new)
    values = {path: jax.tree.leaves(x) for path, x in nnx.to_flat_state(state)}
    containers = {path[:-1] for path in after}
    for path, x in after.items():
        if path in values and _are_same(jax.tree.leaves(x), values[path]):
            continue
        old = before.get(path)
        if isinstance(old, nnx.Variable) and type(x) is type(old):
            old.set_value(x.get_value())
        elif path not in before or (path not in containers and not _are_same(x, old)):
            if path[:-1] in before:
                _set(before[path[:-1]], path[-1], x)
    for path in before:
        if path not in after and path[:-1] in after:
            delattr(before[path[:-1]], str(path[-1]))


def _are_same(a: Any, b: Any) -> bool:
    """Returns True for one object, and for lists and the like of the same ones."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    return a is b or (isinstance(a, dict) and a == b)


def _set(owner: Any, key: Any, x: Any) -> None:
    if isinstance(owner, nnx.Pytree):
        setattr(owner, str(key), x)
    else:
        owner[key] = x
