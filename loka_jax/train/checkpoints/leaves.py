"""The leaves of a saved state by name: to host memory and back, and what must agree."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves by their paths, such as "params/dense_0/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
    }
    for name, leaf in named.items():
        if not hasattr(leaf, "dtype"):
            raise ValueError(
                f"state leaf {name!r} is a {type(leaf).__name__}, not an array: wrap "
                "it in jnp.asarray, or put it into meta."
            )
    # {"a": {"b": x}, "a/b": y} would share a name; only a programming error does that.
    assert len(named) == len(leaves), "two leaves share a path"
    return named


def to_host(leaf: Any) -> np.ndarray | jax.Array:
    """Returns a copy of a leaf in host memory.

    A copy, as the array may be donated and its memory reused while Orbax writes. An
    array that processes share stays as it is. One that each process has for itself is
    equal in all, such as a learning rate.
    """
    if not getattr(leaf, "is_fully_addressable", True):
        return leaf
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
        return np.array(leaf, copy=True)
    # Of an array over several devices JAX would make a copy of its own, and keep it.
    out = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            out[shard.index] = shard.data
    return out


def from_host(array: np.ndarray | jax.Array | None, template: Any) -> Any:
    """Returns a restored leaf of the template's type, on the template's devices.

    Args:
        array: in host memory, or on these devices already; None without elements.
    """
    if isinstance(array, jax.Array):
        return array
    if array is None:  # arrays without elements are not written
        array = np.zeros(template.shape, template.dtype)
    if isinstance(template, np.ndarray | np.generic):
        return array
    # An uncommitted array stays so: a committed copy would cause a recompilation.
    sharding: Any = template.sharding
    if sharding is None or not getattr(template, "committed", True):
        return jnp.asarray(array)
    # No device, and no process, needs all of it on its devices.
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def described(tree: Any) -> dict[str, str]:
    """Returns dtype and shape of the leaves by name, such as "float32[8, 4]"."""
    named = named_leaves(tree)
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named.items()}


def require_fit(saved: dict[str, str], template: Any, path: Path) -> None:
    """Raises ValueError at the first leaf in which checkpoint and template differ.

    The leaves of the checkpoint at `path` are as `described`.
    """
    expected = described(template)
    names = [n for n in {**expected, **saved} if saved.get(n) != expected.get(n)]
    if not names:
        return
    name = names[0]
    more = f" (and {len(names) - 1} more leaves differ)" if names[1:] else ""
    raise ValueError(
        f"{path} does not fit this model: {name!r} is {saved.get(name, 'absent')} "
        f"there and {expected.get(name, 'absent')} here{more}: resume with the config "
        f"it was saved with, or use another --workdir."
    )
