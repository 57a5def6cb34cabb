"""Runs operations that are found whole in a program, by kernels made for them.

products of vectors in pairs    Triton's `dot_features`
softmax attention               cuDNN's
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from loka_jax import triton
from loka_jax.nn.context import current
from loka_jax.nn.explicit_axes import run_in_auto
from loka_jax.nn.found_attention import FoundAttention, Operand
from loka_jax.nn.found_pairs import FoundPairs
from loka_jax.nn.program import Value
from loka_jax.nn.rowwise import without_ones
from loka_jax.ops.device import local_device
from loka_jax.ops.interaction import dot_features, why_not_by_kernel

_LEAST_KEYS = 96  # of 64, an H200 trains faster by XLA (docs/your-model.md)
_PRECISIONS = (
    None,
    (jax.lax.Precision.DEFAULT,) * 2,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32,  # of JAX's own attention
)


def runs_by(whole: FoundPairs | FoundAttention) -> str:
    """Returns the name of the kernel."""
    return "triton dot_features" if isinstance(whole, FoundPairs) else "cudnn attention"


def why_as_written(whole: FoundPairs | FoundAttention, dtype: DTypeLike) -> str | None:
    """Returns why an operation runs as written, or None.

    Args:
        dtype: in which the kernel would run.
    """
    for product in (x for x in whole.steps if x.name == "dot_general"):
        if (precision := product.params["precision"]) not in _PRECISIONS:
            return f"in precision {precision}"
    if current().observer is not None:
        return "Probe observes it"
    if isinstance(whole, FoundPairs):
        return why_not_by_kernel(whole.z.shape, dtype)
    return _why_not_attention(whole, dtype)


def run_whole(
    whole: FoundPairs | FoundAttention,
    value: Callable[[Value], Array],
    dtype: DTypeLike,
) -> Array:
    """Returns the result of an operation.

    Args:
        value: returns the array of a value of the program.
    """
    if isinstance(whole, FoundPairs):
        shape = whole.z.shape
        rows = value(whole.z).astype(dtype).reshape(shape[0], -1)

        def run(rows: Array) -> Array:
            z = rows.reshape(shape)
            return dot_features(None, z, multiple=1, pairs=whole.pairs)

        return run_in_auto(run, rows, rows, rows)
    return _attention(whole, value, dtype)


def _why_not_attention(whole: FoundAttention, dtype: DTypeLike) -> str | None:
    device = current().device or local_device()
    if device.compute_capability != "9.0":
        return "no Hopper GPU"
    if triton.is_left_out():
        return "JAX exports no kernel of cuDNN's"
    if jnp.dtype(dtype).itemsize != 2:
        return f"in {jnp.dtype(dtype).name}"
    q, k, v = (_rows_shape(x) for x in (whole.q, whole.k, whole.v))
    if min(q[1], k[1]) < _LEAST_KEYS:
        return f"{q[1]} queries and {k[1]} keys, {_LEAST_KEYS} of each would pay"
    if whole.q.value.aval.sharding.mesh.explicit_axes:
        return "on a mesh with Explicit axes"
    has_mask = whole.mask is not None and not whole.is_causal
    mask = (q[0], q[2], q[1], k[1]) if has_mask else None
    return _why_not_by_cudnn(q, k, v, mask, whole.is_causal, jnp.dtype(dtype).name)


@functools.cache
def _why_not_by_cudnn(
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    mask: tuple[int, ...] | None,
    is_causal: bool,
    dtype: str,
) -> str | None:
    """Returns what JAX says of operands of these shapes, None if cuDNN serves them."""

    def total(q, k, v, mask):
        return jnp.sum(_by_cudnn(q, k, v, mask, is_causal, 1.0).astype(jnp.float32))

    own = [jax.ShapeDtypeStruct(shape, dtype) for shape in (q, k, v)]
    own += [None if mask is None else jax.ShapeDtypeStruct(mask, bool)]
    try:
        jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), *own)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def _by_cudnn(
    q: Float[Array, "B T h d"],
    k: Float[Array, "B S h d"],
    v: Float[Array, "B S h e"],
    mask: Bool[Array, "_ _ T S"] | None,
    is_causal: bool,
    scale: float,
) -> Float[Array, "B T h e"]:
    return jax.nn.dot_product_attention(
        *(q, k, v),
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        implementation="cudnn",
    )


def _sizes(operand: Operand) -> tuple[int, ...]:
    """Returns the sizes of an operand's dims: of examples and heads, rows, columns."""
    shape = without_ones(operand.value.shape)
    return tuple(shape[dim] for dim in operand.dims)


def _rows_shape(operand: Operand) -> tuple[int, int, int, int]:
    """Returns the shape of an operand for cuDNN: examples, rows, heads, columns."""
    *batch, rows, columns = _sizes(operand)
    heads = batch[-1] if len(batch) > 1 else 1
    return math.prod(batch) // heads, rows, heads, columns


def _attention(
    whole: FoundAttention, value: Callable[[Value], Array], dtype: DTypeLike
) -> Array:
    *batch, queries, _ = _sizes(whole.q)
    examples, _, heads, _ = _rows_shape(whole.q)

    def rows(operand: Operand) -> Array:
        x = value(operand.value).astype(dtype)
        x = x.reshape(without_ones(x.shape)).transpose(operand.dims)
        return x.reshape(examples, heads, *x.shape[-2:]).swapaxes(1, 2)

    q, k, v = rows(whole.q), rows(whole.k), rows(whole.v)
    mask = None
    if whole.mask is not None and not whole.is_causal:
        mask = value(whole.mask.value).astype(bool) != whole.mask.is_bias
        dims = zip(mask.shape, whole.mask.shape, strict=True)
        mask = mask.reshape([own for own, size in dims if size != 1])
        # cuDNN's may be one for all examples or heads, not for all queries or keys.
        leading = mask.shape[:-2] if len(batch) == 2 else batch
        mask = jnp.broadcast_to(mask, (*leading, queries, k.shape[1]))
        if len(batch) != 2:
            mask = mask.reshape(examples, heads, *mask.shape[-2:])
    out = _by_cudnn(q, k, v, mask, whole.is_causal, float(whole.scale)).swapaxes(1, 2)
    back = np.argsort(whole.result.dims)
    return out.reshape(*batch, queries, out.shape[-1]).transpose(*back)
