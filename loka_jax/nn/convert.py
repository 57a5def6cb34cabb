"""Any Flax Linen model with its dense layers as sites, without touching its code.

    model = nn.convert(your_model, recipe="fp8_rowwise", skip="head")
    variables = model.init(key, x)
    y = model.apply(variables, x)

Flax lets a caller intercept the methods of modules. `Dense`, `DenseGeneral` (and with
it the projections of attention) and `Einsum` keep their parameters, names and dtypes;
their product alone is replaced. So checkpoints go either way. A recipe with delayed
scaling adds its collection beside the parameters.

In an `nn.Sequential`, where nothing else can read what a layer returns, a `Dense`, the
norm after it and the activation after that are one site, `NormDense`.
"""

import dataclasses
import fnmatch
import functools
import inspect
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.module import merge_param

from loka_jax import compat
from loka_jax.nn.context import as_recipe, current, site_context
from loka_jax.nn.dense import einsum, product
from loka_jax.nn.fused_sequence import (
    ALONE,
    Followed,
    ParametersOf,
    fused_call,
    norm_parameters,
    run_fused,
)
from loka_jax.nn.sites import announce
from loka_jax.ops.device import local_device
from loka_jax.ops.plan import resolve
from loka_jax.recipe import Recipe
from loka_jax.site import BF16, SiteSpec

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
    """Returns a model that runs the dense layers of a Flax model as sites.

    Args:
        model: any Linen module, in which our own modules keep their recipes; or any NNX
            module, of which a copy is returned, see `convert_nnx`.
        only: patterns of paths ("tower/*") of the layers to convert.
        skip: patterns of paths of layers to leave as they are, though in `only`.

    Raises:
        ValueError: if there is no recipe of that name; if what is given is no model,
            but its class, say; if a pattern matches no layer, of a Linen model when it
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
    return Converted(model, recipe, _patterns(only), _patterns(skip))


@dataclasses.dataclass(frozen=True)
class Converted:
    """A model with its dense layers as sites; used as the model itself is."""

    model: linen.Module
    recipe: str | Recipe
    only: tuple[str, ...]
    skip: tuple[str, ...]

    def clone(self, **changes: Any) -> "Converted":
        """Returns the model with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's variables."""
        return self._run(self.model.init, {}, *args, **kwargs)

    def init_with_output(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Returns the model's output and its variables."""
        return self._run(self.model.init_with_output, {}, *args, **kwargs)

    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the model's `apply`."""
        parameters = variables.get("params", {})
        return self._run(self.model.apply, parameters, variables, *args, **kwargs)

    def _run(self, function: Callable, parameters: Any, *args, **kwargs):
        fuses = not kwargs.get("capture_intermediates", False)
        # By its text, as models need not be hashable.
        conversions = (*current().conversions, (repr(self), fuses))
        conversion = _Conversion(self, fuses, conversions)
        with (
            site_context(conversions=conversions),
            linen.intercept_methods(conversion.intercept),
        ):
            out = function(*args, **kwargs)
        if _is_whole_call(kwargs.get("method")):
            conversion.check_patterns(parameters)
        return out


class _Conversion:
    """One call of a converted model.

    Attributes:
        seen: paths of layers that can be sites, in order.
        modules: those whose methods are running, with the paths of their roots.
    """

    def __init__(self, converted: Converted, fuses: bool, conversions: tuple):
        self.converted = converted
        self.fuses = fuses
        self.conversions = conversions
        self.seen = _seen_paths(conversions)
        self.modules: list[tuple[linen.Module, tuple[str, ...]]] = []

    def intercept(self, call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        """Returns what a method of a module returns; flax's `intercept_methods`."""
        module = context.module
        self.modules.append((module, self.root_of(module)))
        try:
            if context.method_name != "__call__":
                return call(*args, **kwargs)
            return self.run(call, args, kwargs, context)
        finally:
            self.modules.pop()

    def host(self, module: linen.Module) -> "Host":
        """Returns a layer as the module of a site."""
        path = (*self.root_of(module), *module.path)
        return Host(module, path, self.converted.recipe)

    def root_of(self, module: linen.Module) -> tuple[str, ...]:
        """Returns the path of the model whose part a module is by its own path.

        It is not empty within an `apply` by another module, of a model of its own.
        """
        if not self.modules:
            return ()
        caller, root = self.modules[-1]
        # A transformation of Flax makes another module of the caller's class.
        if module.path or isinstance(caller, type(module)):
            return root
        return (*root, *caller.path, module.name or type(module).__name__)

    def run(self, call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        """Returns what a module's `__call__` returns."""
        module = context.module
        if type(module) is linen.Sequential and self.fuses:
            return fused_call(
                module, args, kwargs, lambda layer: self.why_left(self.host(layer))
            )
        if args and isinstance(args[0], ParametersOf):
            return norm_parameters(module, args[0].features)
        if not isinstance(module, linen.Dense | linen.DenseGeneral | linen.Einsum):
            return call(*args, **kwargs)
        host = self.host(module)
        self.see("/".join(host.path))
        why_left = self.why_left(host)
        # A subclass may call Flax's own, which is then a site, or never.
        if why_left is None and context.orig_method.func not in _FLAX_CALLS:
            why_left = f"{type(module).__name__} has a product of its own"
        if why_left is not None:
            out = call(*args, **kwargs)
            if self.announces_left(module):
                _announce_left(host, why_left, args, kwargs, out)
            return out
        if args and isinstance(args[0], Followed):
            return run_fused(host, args[0])
        if isinstance(module, linen.Einsum):
            return _einsum(host, *args, **kwargs)
        return _with_product(module, host, call, args, kwargs)

    def see(self, path: str) -> None:
        """Notes a layer, for the conversions inside, too: they may not be asked."""
        conversions = current().conversions
        for depth in range(len(self.conversions), len(conversions) + 1):
            _seen_paths(conversions[:depth])[path] = None

    def announces_left(self, module: linen.Module) -> bool:
        """Returns True for the one call of a layer that tells that it is left.

        Not for that of a subclass to `super()`, nor if a conversion inside tells it.
        """
        is_inside = any(caller is module for caller, _ in self.modules[:-1])
        context = current()
        is_last = self.conversions == context.conversions
        return context.is_listing and is_last and not is_inside

    def why_left(self, host: "Host") -> str | None:
        """Returns why a layer is left as it is, or None if it becomes a site."""
        path = "/".join(host.path)
        for pattern in self.converted.skip:
            if fnmatch.fnmatchcase(path, pattern):
                return f"skip={pattern!r}"
        if not any(fnmatch.fnmatchcase(path, p) for p in self.converted.only):
            return f"not in only={', '.join(self.converted.only)}"
        own = ("dot_general", "dot_general_cls")
        if any(getattr(host.module, name, None) is not None for name in own):
            return "has a dot_general of its own"
        return None

    def check_patterns(self, parameters: Any) -> None:
        """Refuses patterns that match no layer.

        Args:
            parameters: of the model, of which a call may use a part only.

        Raises:
            ValueError: naming the patterns and the layers.
        """
        paths = {*self.seen, *_owners(parameters)}
        if not paths:
            raise ValueError(
                f"{type(self.converted.model).__name__} calls no Dense, DenseGeneral "
                "or Einsum of Flax Linen: there is nothing to convert."
            )
        for pattern in (*self.converted.only, *self.converted.skip):
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                raise ValueError(
                    f"pattern {pattern!r} matches no dense layer: there are "
                    f"{', '.join(self.seen)}."
                )


@functools.cache
def _seen_paths(conversions: tuple) -> dict[str, None]:
    """Returns the paths of layers seen by a conversion, in this call or an earlier one.

    JAX does not trace again what it has in a cache.
    """
    return {}


# As an interceptor gets them.
_FLAX_CALLS = [
    inspect.unwrap(layer.__call__)
    for layer in (linen.Dense, linen.DenseGeneral, linen.Einsum)
]


@dataclasses.dataclass(frozen=True)
class Host:
    """A Flax layer as the module of a site: with a recipe, else itself.

    Attributes:
        axis_names: none: under `shard_map`, JAX knows which values vary.
    """

    module: linen.Module
    path: tuple[str, ...]
    recipe: str | Recipe
    axis_names: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the layer."""
        return getattr(self.module, name)


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


def _with_product(module, host: Host, call: Callable, args, kwargs):
    """Returns what a Dense or DenseGeneral returns, its product a site."""

    def dot_general(lhs, rhs, dimension_numbers, precision=None, **options):
        dtype = options.get("preferred_element_type")
        return product(host, lhs, rhs, dimension_numbers, precision, dtype, apart=ALONE)

    with compat.dot_general_set(module, dot_general):
        return call(*args, **kwargs)


def _einsum(host: Host, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
    """Returns what an Einsum of Flax returns, its product a site.

    Flax's layer has no place for another product, so its equations are here again.
    """
    module: Any = host.module
    equation = merge_param("einsum_str", module.einsum_str, einsum_str)
    kernel = module.param(
        "kernel", module.kernel_init, module.shape, module.param_dtype
    )
    bias, shape = None, ()
    if module.use_bias:
        bias_shape, shape = compat.bias_shapes(module, equation, inputs, kernel)
        bias = module.param("bias", module.bias_init, bias_shape, module.param_dtype)
    inputs, kernel, bias = module.promote_dtype(
        inputs, kernel, bias, dtype=module.dtype
    )
    dtype = module.preferred_element_type
    out = einsum(host, equation, inputs, kernel, module.precision, dtype, apart=ALONE)
    return out if bias is None else out + jnp.reshape(bias, shape)


def _announce_left(host: Host, why_left: str, args, kwargs, out) -> None:
    """Announces a layer that stays as it is, for `list_sites`."""
    lhs, result = (jax.tree.leaves(v)[0].shape for v in ((args, kwargs), out))
    # An empty batch as one row, so that it does not hide k and n.
    x, y = (math.prod(max(1, size) for size in shape) for shape in (lhs, result))
    kernel = jax.tree.leaves(host.module.get_variable("params", "kernel"))
    w = math.prod(kernel[0].shape) if kernel else lhs[-1] * result[-1]
    # From the sizes m k, k n and m n of the product's matrices.
    m, k, n = (max(1, math.isqrt(v)) for v in (x * y // w, x * w // y, w * y // x))
    spec = SiteSpec(m=m, k=k, n=n)
    announce(host, resolve(spec, BF16, local_device()), left=why_left)
