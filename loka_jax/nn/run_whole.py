"""Runs operations that are found whole in a program, by kernels made for them.

products of vectors in pairs    Triton's `dot_features`
softmax attention               cuDNN's
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from loka_jax import triton
from loka_jax.nn.context import current
from loka_jax.nn.explicit_axes import run_in_auto
from loka_jax.nn.found_attention import FoundAttention, Operand
from loka_jax.nn.found_pairs import FoundPairs
from loka_jax.nn.program import Step, Value
from loka_jax.nn.rowwise import without_ones
from loka_jax.ops.device import local_device
from loka_jax.ops.interaction import dot_features, why_not_by_kernel

_LEAST_KEYS = 128  # a tile of cuDNN's: of fewer, dense products waste less
_MOST_COLUMNS = 128
_PRECISIONS = (
    None,
    (jax.lax.Precision.DEFAULT,) * 2,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32,  # of JAX's own attention
)


def runs_by(whole: FoundPairs | FoundAttention) -> str:
    """Returns the name of the kernel."""
    return "triton dot_features" if isinstance(whole, FoundPairs) else "cudnn attention"


def why_as_written(
    product: Step, whole: FoundPairs | FoundAttention, dtype: DTypeLike
) -> str | None:
    """Returns why an operation runs as written, or None.

    Args:
        product: its first.
        dtype: in which the kernel would run.
    """
    precision = product.params["precision"]
    if precision not in _PRECISIONS:
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
    q, k, v = (_shape(x) for x in (whole.q, whole.k, whole.v))
    *_, queries, columns = q
    if device.compute_capability != "9.0":
        return "no Hopper GPU"
    if triton.is_left_out():
        return "JAX exports no kernel of cuDNN's"
    if jnp.dtype(dtype).itemsize != 2:
        return f"in {jnp.dtype(dtype).name}"
    if columns % 8 or columns > _MOST_COLUMNS or v[-1] != columns:
        return f"heads of {columns} and {v[-1]} columns"
    if min(queries, k[-2]) < _LEAST_KEYS:
        return f"{queries} queries and {k[-2]} keys, {_LEAST_KEYS} of each would pay"
    has_mask = whole.mask is not None and not whole.mask.is_causal
    if has_mask and (queries % 2 or k[-2] % 2):
        return f"{queries} queries and {k[-2]} keys, one of them odd, under a mask"
    if whole.q.value.aval.sharding.mesh.explicit_axes:
        return "on a mesh with Explicit axes"
    return None


def _shape(operand: Operand) -> tuple[int, ...]:
    shape = without_ones(operand.value.shape)
    return tuple(shape[dim] for dim in operand.dims)


def _attention(
    whole: FoundAttention, value: Callable[[Value], Array], dtype: DTypeLike
) -> Array:
    *batch, queries, _ = _shape(whole.q)
    heads = batch[-1] if len(batch) > 1 else 1
    examples = math.prod(batch) // heads

    def rows(operand: Operand) -> Array:
        x = value(operand.value).astype(dtype)
        x = x.reshape(without_ones(x.shape)).transpose(operand.dims)
        return x.reshape(examples, heads, *x.shape[-2:]).swapaxes(1, 2)

    q, k, v = rows(whole.q), rows(whole.k), rows(whole.v)
    mask, is_causal = None, whole.mask is not None and whole.mask.is_causal
    if whole.mask is not None and not is_causal:
        mask = value(whole.mask.value).astype(bool)
        dims = zip(mask.shape, whole.mask.shape, strict=True)
        mask = mask.reshape([own for own, size in dims if size != 1])
        # cuDNN's has one for all examples or heads, but one for each query and key.
        leading = mask.shape[:-2] if len(batch) == 2 else batch
        mask = jnp.broadcast_to(mask, (*leading, queries, k.shape[1]))
        if len(batch) != 2:
            mask = mask.reshape(examples, heads, *mask.shape[-2:])
    out = jax.nn.dot_product_attention(
        *(q, k, v),
        mask=mask,
        scale=float(whole.scale),
        is_causal=is_causal,
        implementation="cudnn",
    ).swapaxes(1, 2)
    back = np.argsort(whole.result.dims)
    return out.reshape(*batch, queries, out.shape[-1]).transpose(*back)
