"""Float32 arrays whose gradients JAX merges by the maximum, not by the sum.

JAX adds up the gradients of a value that is used more than once: by two calls of a
layer, by the steps of a scan, under `jax.checkpoint`. A differentiated array of the
extended dtype `MaxMerged` has gradients of that dtype, and the rules of an extended
dtype say what their sum is:

    sum = maximum        zero = -inf

    table    float32     what the caller holds and differentiates with respect to
    merged   MaxMerged   what all uses share; the conversions are free
    gradient float32     the maximum; where no use contributes, the table itself

Where the result does not depend on any use, JAX asks no rule: the gradient is zero.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import fp8_meta_dtype_wrapper

# Not public in JAX: the type of concrete arrays of an extended dtype, and the table in
# which JAX looks up their sum outside of jit. JAX left that entry out.
from jax._src.ad_util import raw_jaxval_adders
from jax._src.earray import EArray
from jax.core import Tracer
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, repr=False)
class MaxMerged(fp8_meta_dtype_wrapper):
    """The extended dtype; Flax's, whose rules are those above, with a place of origin.

    Attributes:
        manual_axes: mesh axes of the `shard_map` in which the array became merged.
    """

    float_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    manual_axes: frozenset[str] = frozenset()
    name = "max_merged_float32"


raw_jaxval_adders[EArray] = lambda x, y: x.dtype._rules.add(x.dtype, x, y)


def merged(x: Array) -> Array:
    """Returns a float32 array that may be differentiated as `MaxMerged`.

    Its gradient is the maximum of what all uses contribute, and the array itself where
    none contributes; but zeros, made by JAX, where what is differentiated depends on no
    use. Concrete arrays, which nothing differentiates, stay as they are.
    """
    if isinstance(x.dtype, MaxMerged) or not isinstance(x, Tracer):
        return x
    return _merged(x)


def merged_if_differentiated(x):
    """Returns a leaf of a pytree, `merged` if JAX is differentiating in it.

    A merged array that left all transformations, by a way other than gradients, becomes
    float32 again.
    """
    if isinstance(x, Tracer) and hasattr(x, "tangent") and x.dtype == jnp.float32:
        return merged(x)
    return unmerged(x) if isinstance(x, EArray) else x


@jax.custom_vjp
def _merged(table):
    dtype = MaxMerged(manual_axes=frozenset(manual_axes()))
    return jax.lax.convert_element_type(table, dtype)


def _forward(table):
    return _merged(table), table


def _backward(table, gradient):
    gradient = unmerged(gradient)
    return (jnp.where(jnp.isneginf(gradient), table, gradient),)


_merged.defvjp(_forward, _backward)


def unmerged(x: Array) -> Float[Array, "*shape"]:
    """Returns the float32 values of an array that may be `MaxMerged`.

    Raises:
        ValueError: if the array came into a `shard_map` that does not track varying
            values: JAX would sum its gradient over the devices.
    """
    dtype, axes = x.dtype, manual_axes()
    if not isinstance(dtype, MaxMerged):
        return x
    if dtype.manual_axes != frozenset(axes) and not tracks_varying(axes):
        raise ValueError(
            "a delayed-scaling state is differentiated from outside of a shard_map "
            f"over {axes} with check_vma=False, where JAX sums its gradient over the "
            "devices: differentiate inside of the shard_map, or leave check_vma on."
        )
    return _unmerged(dtype, x)


# Of the conversion alone JAX cannot take the gradient (0.11.2 raises AttributeError).
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unmerged(dtype: MaxMerged, x: Array) -> Array:
    del dtype
    return jax.lax.convert_element_type(x, jnp.float32)


_unmerged.defvjp(
    lambda dtype, x: (_unmerged(dtype, x), None),
    lambda dtype, _, gradient: (jax.lax.convert_element_type(gradient, dtype),),
)


_merged_by_caller = contextvars.ContextVar("merged_by_caller", default=False)


@contextlib.contextmanager
def merging_over_devices() -> Iterator[None]:
    """Leaves the maximum over the devices of a `shard_map` to the caller.

    Each device's gradient is then what it alone contributes, and one collective merges
    those of all arrays, instead of one for each.
    """
    token = _merged_by_caller.set(True)
    try:
        yield
    finally:
        _merged_by_caller.reset(token)


def axes_to_merge() -> tuple[str, ...]:
    """Returns the axes of a `shard_map` that tracks none, over which gradients differ.

    () if the caller merges them.
    """
    return () if _merged_by_caller.get() else manual_axes()


def manual_axes() -> tuple[str, ...]:
    """Returns the mesh axes of the `shard_map` that is traced."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def tracks_varying(axes: tuple[str, ...]) -> bool:
    """Returns True if `shard_map` tracks over which of its axes values vary."""
    if not axes:
        return True
    marked = jax.lax.pcast(jnp.zeros(()), axes, to="varying")
    return bool(jax.typeof(marked).mat.varying)
