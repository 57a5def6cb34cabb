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

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
from flax import linen
from flax.core import unfreeze

from loka_jax.nn.context import as_recipe, current
from loka_jax.nn.conversion import Rules, run_converted, with_made
from loka_jax.nn.converted_function import ConvertedFunction
from loka_jax.nn.host import Made
from loka_jax.recipe import Recipe

if TYPE_CHECKING:
    from flax import nnx


@typing.overload
def convert(model: linen.Module, *, recipe=..., only=..., skip=...) -> "Converted": ...


@typing.overload
def convert[M: "nnx.Module"](
    model: M, *inputs: Any, recipe=..., only=..., skip=...
) -> M: ...


def convert(
    model: Any,
    *inputs: Any,
    recipe: str | Recipe | None = None,
    only: str | tuple[str, ...] = "*",
    skip: str | tuple[str, ...] = (),
) -> Any:
    """Returns a model that runs the products of a Flax model as sites.

    Args:
        model: any Linen module, in which our own modules keep their recipes; or any NNX
            module, of which a copy is returned, see `convert_nnx`; or a function whose
            first argument is a dictionary of parameters, see `ConvertedFunction`; or a
            `FlaxPreTrainedModel` of Hugging Face, of which a copy is returned. It hands
            on parameters alone: for delayed scaling convert its `module`.
        inputs: of a call of an NNX module, arrays or their shapes, by which delayed
            scales are made; without them its first call makes them.
        recipe: of all sites, whatever it costs. Without one each site and group runs
            what Dispatch predicts to be the fastest in training: bfloat16 by XLA or by
            kernels of ours, or as written; FP8 only by a plan (`nn.Planned`) that knows
            its errors. Without a GPU all sites run as written.
        only: patterns of paths ("tower/*") of the sites to convert, or of the modules
            that they are in.
        skip: patterns of what to leave as it is, though in `only`.

    Raises:
        ValueError: if there is no recipe of that name; if what is given is no model,
            but its class, say; if a model other than of NNX is given inputs. When the
            model is called: if a pattern matches no site.
    """
    if recipe is not None:
        as_recipe(recipe)
    if isinstance(model, type):
        raise ValueError(f"{model.__name__} is a class: give a model, an instance.")
    from flax import nnx  # a tenth of a second, which not all need

    if isinstance(model, nnx.Module):
        from loka_jax.nn.nnx_convert import convert_nnx

        return convert_nnx(model, inputs, recipe, _patterns(only), _patterns(skip))
    if inputs:
        raise ValueError(f"{_repr(model)} takes inputs in `init`: give `convert` none.")
    if inspect.isfunction(model):
        return ConvertedFunction(model, recipe, _patterns(only), _patterns(skip))
    if isinstance(getattr(model, "_module", None), linen.Module):
        own = convert(model._module, recipe=recipe, only=only, skip=skip)
        copied = copy.copy(model)
        copied._module = own
        return copied
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
    recipe: str | Recipe | None = None
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
        if self._bound is None or hasattr(self.of.model, name):
            return getattr(self.of.model, name)
        # What `setup` defines.
        found = getattr(self.written.bind(self._bound.variables), name)
        if not isinstance(found, linen.Module):
            return found

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(module, name)(*args, **kwargs)

        return functools.partial(self._call_within, call)

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
            return run(variables), with_made(variables, made, self._place)
        jax.eval_shape(lambda variables: (run(variables), ())[1], variables)
        return None, with_made(variables, made, self._place)

    @linen.nowrap
    def _apply(self, variables: Any, args, kwargs, made: Made | None = None) -> Any:
        rules = Rules(self.conversions, self._place)

        def call(variables):
            return self.written.apply(variables, *args, **kwargs)

        out = run_converted(call, variables, rules, self._place, made)
        if _is_whole_call(kwargs.get("method")):
            rules.check_patterns(variables.get("params", {}))
        return out

    @linen.nowrap
    def _call_within(self, method: str | Callable, *args: Any, **kwargs: Any) -> Any:
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
