"""Over which axes of a `shard_map` values vary, and who merges scales over them."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp

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


def varying_axes(x: jax.Array) -> tuple[str, ...]:
    """Returns the axes of the `shard_map` that is traced over which a value may vary.

    All of them where `shard_map` does not track it.
    """
    axes = manual_axes()
    if not tracks_varying(axes):
        return axes
    varying = jax.typeof(x).mat.varying if axes else ()
    return tuple(axis for axis in axes if axis in varying)


def tracks_varying(axes: tuple[str, ...]) -> bool:
    """Returns True if `shard_map` tracks over which of its axes values vary."""
    if not axes:
        return True
    marked = jax.lax.pcast(jnp.zeros(()), axes, to="varying")
    return bool(jax.typeof(marked).mat.varying)
