"""Sites of arrays on a mesh with Explicit axes, the default of `jax.make_mesh`.

Types of such arrays say how they are sharded, and JAX asks each operation how its
result is to be. A site answers once, for all of its operations: rows stay where those
of lhs are, columns where those of the kernel are. Inside, axes are Auto.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array


def run_in_auto(
    function: Callable[..., Any], lhs: Array, rhs: Array, *args: Any
) -> Any:
    """Returns `function(*args)`, run with Auto axes if lhs or rhs has Explicit ones.

    Args:
        function: of pytrees of arrays, which returns rows of lhs or scalars.
        rhs: (k, n), whose columns are those of the result.
    """
    mesh = _mesh(lhs, rhs)
    if mesh is None:
        return function(*args)
    rows, columns = _spec(lhs)[:-1], _spec(rhs)[-1]
    if set(_names(columns)) & {name for axis in rows for name in _names(axis)}:
        columns = None  # a mesh axis shards one dim only

    def sharding(out: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = PartitionSpec()
        if out.ndim:
            last = columns if out.shape[-1] == rhs.shape[-1] else None
            spec = PartitionSpec(*rows, last)
        return NamedSharding(mesh, spec)

    # By shapes alone: the function itself cannot be traced in Explicit axes.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        outputs = jax.eval_shape(function, *shapes)
    out_sharding = jax.tree.map(sharding, outputs)
    run = jax.sharding.auto_axes(
        function, axes=mesh.explicit_axes, out_sharding=out_sharding
    )
    return run(*args)


def _mesh(*operands: Array) -> Any:
    for x in operands:
        mesh = jax.typeof(x).sharding.mesh
        if mesh.explicit_axes:
            return mesh
    return None


def _spec(x: Array) -> tuple[Any, ...]:
    spec = jax.typeof(x).sharding.spec
    return (*spec, *[None] * (x.ndim - len(spec)))


def _names(axis: Any) -> tuple[str, ...]:
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)
