"""Dense, norm and activation in a row of an `nn.Sequential`, as one site.

A `Sequential` hands what a layer returns to the next one alone, so that a product needs
never be written. In other code of a model nothing tells who else reads it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import canonicalize_dtype

from loka_jax.nn.context import current
from loka_jax.nn.dense import run_planned
from loka_jax.nn.norms import BlockNorm
from loka_jax.nn.sites import announce
from loka_jax.normed import NORM_BLOCK, ActivationName, NormName
from loka_jax.ops.run_site import SiteArrays
from loka_jax.site import SiteSpec

_ACTIVATIONS: dict[Any, ActivationName] = {
    jax.nn.relu: "relu",
    jax.nn.silu: "swish",
    jax.nn.hard_silu: "hard_swish",
    jax.nn.gelu: "gelu",
}
ALONE = (
    "what follows is the model's own code: only in an nn.Sequential is it plain that "
    "nothing else reads the product"
)
_LAST = (-1, (-1,), [-1])  # how Flax names the last axis


@dataclasses.dataclass(frozen=True)
class Tail:
    """What follows a Dense in a row, as far as it can be part of its site.

    Attributes:
        norm: a module; None without one.
        norm_name: of the norm.
        activation: after it.
        length: number of layers.
        apart: why the next layer is not part of the site; None if it could not be.
    """

    norm: Any = None
    norm_name: NormName = "none"
    activation: ActivationName = "none"
    length: int = 0
    apart: str | None = None


@dataclasses.dataclass(frozen=True)
class Followed:
    """The argument of a Dense that is called together with its tail."""

    inputs: jax.Array
    tail: Tail


@dataclasses.dataclass(frozen=True)
class ParametersOf:
    """The argument of a norm that is asked for its parameters."""

    features: int


def fused_call(
    module: linen.Sequential,
    args: tuple,
    kwargs: dict,
    why_left: Callable[[linen.Module], str | None],
) -> Any:
    """Returns what a Sequential returns, each Dense called together with its tail.

    Args:
        module: the Sequential.
        args, kwargs: of its first layer.
        why_left: why a Dense is not to be a site, or None.
    """
    layers: Any = module.layers
    i, out = 0, None
    while i < len(layers):
        layer, tail = layers[i], Tail()
        is_dense = type(layer) is linen.Dense and len(args) == 1 and not kwargs
        if is_dense and _is_real(layer, args[0]) and why_left(layer) is None:
            tail = tail_of(layers[i + 1 :])
            args = (Followed(args[0], tail),)
        out = layer(*args, **kwargs)
        i += 1 + tail.length
        kwargs = out if isinstance(out, dict) else {}
        args = out if isinstance(out, tuple) else () if kwargs else (out,)
    return out


def _is_real(layer: Any, x: jax.Array) -> bool:
    dtypes = (layer.dtype,) if layer.dtype else (x.dtype, layer.param_dtype)
    return not any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)


def run_fused(host: Any, followed: Followed) -> jax.Array:
    """Returns `activation(norm(inputs @ kernel + bias))`, one site.

    Args:
        host: the Dense as a site's module.
        followed: its inputs, and what follows.
    """
    module, x, tail = host.module, followed.inputs, followed.tail
    k, n = x.shape[-1], module.features
    kernel = module.param("kernel", module.kernel_init, (k, n), module.param_dtype)
    bias = gamma = beta = None
    if module.use_bias:
        bias = module.param("bias", module.bias_init, (n,), module.param_dtype)
    dtype = canonicalize_dtype(x, kernel, bias, dtype=module.dtype)
    if tail.norm is not None:
        gamma, beta = tail.norm(ParametersOf(n))
        given = jnp.zeros((), dtype)
        dtype = canonicalize_dtype(given, gamma, beta, dtype=tail.norm.dtype)
    spec = SiteSpec(
        m=math.prod(x.shape[:-1]),
        k=k,
        n=n,
        norm=tail.norm_name,
        activation=tail.activation,
        use_bias=module.use_bias,
    )
    # A kernel would only copy a product that nothing follows.
    provider = None if tail.length else "xla"
    plan = current().plan("/".join(host.path), spec, host.recipe, provider)
    announce(host, plan, apart=tail.apart)
    arrays = SiteArrays(x, kernel, bias, gamma, beta)
    epsilon = 1e-6 if tail.norm is None else tail.norm.epsilon
    out = run_planned(host, plan, arrays, epsilon=epsilon)
    assert isinstance(out, jax.Array)
    return out.astype(dtype)


def tail_of(layers: Any) -> Tail:
    """Returns what of these layers can be part of the site before them."""
    if not layers:
        return Tail()
    norm, rest = layers[0], list(layers)
    name, apart = _norm_name(norm)
    if apart is not None:
        return Tail(apart=apart)
    if name == "none":
        norm = None
    else:
        rest = rest[1:]
    activation, apart = _activation(rest[0]) if rest else ("none", None)
    length = (name != "none") + (activation != "none")
    return Tail(norm, name, activation, length, apart)


def norm_parameters(norm: Any, features: int) -> tuple[Any, Any]:
    """Returns the factors and the summands of a norm, None for absent ones.

    Args:
        norm: as `tail_of` names it, while it is called.
        features: of the rows.
    """
    gamma = beta = None
    shape = (features,)
    if getattr(norm, "use_scale", False):
        gamma = norm.param("scale", norm.scale_init, shape, norm.param_dtype)
    if getattr(norm, "use_bias", False):
        beta = norm.param("bias", norm.bias_init, shape, norm.param_dtype)
    return gamma, beta


def _norm_name(layer: Any) -> tuple[NormName, str | None]:
    """Returns the norm that a layer is, "none" if none, and why it cannot be fused."""
    kind = type(layer)
    if kind is BlockNorm and layer.block == NORM_BLOCK:
        return "block", None
    if kind in (linen.LayerNorm, linen.RMSNorm):
        of_rows = layer.reduction_axes in _LAST and layer.feature_axes in _LAST
        if not of_rows or layer.axis_name is not None:
            return "none", f"{kind.__name__} is over other axes than the last"
        if not (layer.use_fast_variance and layer.force_float32_reductions):
            return "none", f"{kind.__name__} computes its statistics in its own way"
        return ("layer" if kind is linen.LayerNorm else "rms"), None
    if kind.__name__.endswith("Norm"):
        return "none", f"{kind.__name__} is none of LayerNorm, RMSNorm and BlockNorm"
    return "none", None


def _activation(layer: Any) -> tuple[ActivationName, str | None]:
    """Returns the activation that a layer is, "none" if none, and why not."""
    if isinstance(layer, linen.Module):
        return "none", None
    for function, name in _ACTIVATIONS.items():
        if layer is function:
            return name, None
    name = getattr(layer, "__name__", type(layer).__name__)
    return "none", f"{name} is none of {', '.join(_ACTIVATIONS.values())}"
