"""Sums over devices that travel in 8 bits, for anyone's `shard_map`.

    x [m] of a device = n parts, one for each of the n devices
    codes and factors of every part          packed in one array of bytes
    all_to_all                               device i gets the n parts number i
    their float32 sum, in the order of the devices, packed again
    all_gather, unpacked

Two collectives and two roundings, whatever n is; every device unpacks the same bytes,
so that all end with equal bits. A ring would round n times. Roundings are right on
average (`unbiased`): a small gradient beside one that is much larger arrives.

Two devices send each other all of their codes, in one all_gather, and add up what they
unpack: as many bytes, rounded once.

References:
    Ahmed et al.: EQuARX: Efficient Quantized AllReduce in XLA for Distributed Machine
    Learning Acceleration. arXiv 2506.17615.
"""

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree, UInt32

from loka_jax import xla
from loka_jax.mapped import by_kernel
from loka_jax.ops.mesh_axes import manual_axes, tracks_varying
from loka_jax.packed import Format, Packing
from loka_jax.triton import Implementation, chosen
from loka_jax.triton import packed as _triton
from loka_jax.unbiased import words_of

type AxisName = Hashable | tuple[Hashable, ...]
# How the gradients of a step travel.
Wire = Literal["f32", "bf16", "int8"]


def sum_gradients(tree: PyTree, axis_name: AxisName, wire: Wire, key: Array) -> PyTree:
    """Returns gradients summed over devices, in their dtypes and equal on all devices.

    A tree is summed as one array.

    What must be exact (a loss, weights, counters) is no gradient: `psum` it.

    Args:
        wire: "f32" and "bf16" are XLA's sums of arrays of that dtype; "int8" is
            `quantized_psum`. `dispatch.gradient_wire` chooses among them.
    """
    if wire == "int8":
        return quantized_psum(tree, axis_name, key)
    if wire not in ("f32", "bf16"):
        raise ValueError(f"{wire=} must be 'f32', 'bf16' or 'int8'.")
    dtype = jnp.bfloat16 if wire == "bf16" else jnp.float32
    flat, unflatten = ravel_pytree(jax.tree.map(lambda x: x.astype(dtype), tree))
    sums = unflatten(jax.lax.psum(flat, axis_name))
    return jax.tree.map(lambda s, x: s.astype(x.dtype), sums, tree)


def quantized_psum(
    x: PyTree,
    axis_name: AxisName,
    key: Array,
    *,
    format: Format = "int8",
    block: int = 128,
    implementation: Implementation | None = None,
) -> PyTree:
    """Returns the sum over devices of an array, or of each of a tree of them.

    Rounded twice, by two devices once, each time to one of two neighbouring codes by
    chance, so that over all keys the mean is the sum. An int8 block of b values has the
    noise of a step `amax / 127`, after r roundings a ratio of
    `10 lg(6 127^2 / (r k^2))` dB to the signal, k = E[amax] / sigma of a block: 37.8 dB
    for normal values, b = 128 and r = 2. Every array begins a block, so that small
    values never share one with another array's large ones.

    A value that is not finite makes its block NaN. There is no derivative. On one
    device nothing is rounded.

    JAX sums the gradients of replicated parameters itself in a `shard_map` with
    `check_vma`. Mark the parameters, so that each device keeps its own gradients:

        w = jax.lax.pcast(w, axis_name, to="varying")
        gradients = quantized_psum(jax.grad(loss)(w), axis_name, key)

    Args:
        x: float32 or bfloat16, as its sum is; other floats go as float32.
        key: of `jax.random`, the same on all devices and another one in each step: with
            one key for all steps what is lost in one is lost in all.
        format: of the codes; int8 has 12 dB less noise than e4m3.
        block: values that share a float32 factor: 32, 64, 128 or 256.
        implementation: as in `embedding.sum_by_row`.

    Raises:
        ValueError: if an array does not hold floats, or does not vary over the axes of
            several devices, a block or format does not exist, or Triton is required
            and cannot run.
    """
    leaves, structure = jax.tree.flatten(x)
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"{leaf.dtype} values have no rounded sum: psum them.")
    devices = jax.lax.axis_size(axis_name)
    if devices > 1:
        _require_varying(leaves, axis_name)
    Packing(1, devices, block, format)  # checks block and format, of empty arrays too
    if not any(leaf.size for leaf in leaves):
        return jax.lax.psum(x, axis_name)
    flat, starts = _joined(leaves, block)
    packing = Packing(flat.size, devices, block, format)
    provider = chosen(implementation, _triton.why_not(packing, flat.dtype), "packed")
    if devices == 1:
        return jax.tree.map(lambda y: jax.lax.psum(_undifferentiated(y), axis_name), x)
    words = words_of(key, axis_name, 2)
    total = _sum(_undifferentiated(flat), words, axis_name, packing, provider)
    sums = [
        total[start : start + leaf.size].reshape(leaf.shape).astype(leaf.dtype)
        for start, leaf in zip(starts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, sums)


def _require_varying(leaves: list[Array], axis_name: AxisName) -> None:
    """Checks that each device has values of its own, where JAX tracks that."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    axes = tuple(axis for axis in manual_axes() if axis in names)  # not those of vmap
    if not tracks_varying(axes):
        return
    for leaf in leaves:
        same = [axis for axis in axes if axis not in jax.typeof(leaf).mat.varying]
        if any(jax.lax.axis_size(axis) > 1 for axis in same):
            raise ValueError(
                f"a {leaf.dtype}{[*leaf.shape]} array is the same on all devices of "
                f"{same}, as gradients are that JAX has summed already: mark "
                f'parameters with jax.lax.pcast(w, {axis_name!r}, to="varying") before '
                "differentiating, or give shard_map check_vma=False."
            )


def _joined(leaves: list[Array], block: int) -> tuple[Float[Array, "m"], list[int]]:
    """Returns the arrays as one, each filled up to whole blocks, and where they start.

    Bfloat16 if all are, else float32. Whole blocks also let kernels move whole words.
    """
    is_narrow = all(leaf.dtype == jnp.bfloat16 for leaf in leaves)
    dtype = jnp.bfloat16 if is_narrow else jnp.float32
    parts = [
        jnp.pad(leaf.ravel().astype(dtype), (0, -leaf.size % block)) for leaf in leaves
    ]
    *starts, _ = itertools.accumulate((part.size for part in parts), initial=0)
    return jnp.concatenate(parts), starts


def _sum(
    x: Float[Array, "m"],
    words: UInt32[Array, "2 2"],
    axis_name: AxisName,
    packing: Packing,
    provider: Implementation,
) -> Float[Array, "m"]:
    kernels = _triton if provider == "triton" else xla

    def run(function: Callable, *operands: Array, **static) -> Array:
        function = functools.partial(function, packing=packing, **static)
        if provider == "xla":
            return function(*operands)
        return by_kernel(function, *operands)

    sent = run(kernels.pack, x, words[0])
    if packing.parts > 2:
        received = jax.lax.all_to_all(sent, axis_name, 0, 0, tiled=True)
        sent = run(kernels.sum_packed, received, words[1])
    # Not marked as varying: all devices have the same.
    gathered = jax.lax.all_gather(sent, axis_name, tiled=True, to="invarying")
    return run(kernels.unpack, gathered, dtype=x.dtype)


@jax.custom_jvp
def _undifferentiated(x: Array) -> Array:
    """Returns x; a derivative would be zero, that of rounding."""
    return x


@_undifferentiated.defjvp
def _no_derivative(primals, tangents):
    raise ValueError(
        "quantized_psum has no derivative: differentiate first, then sum the gradients."
    )
