"""Calls of kernels under `vmap` and `shard_map`, which know nothing of kernels."""

from collections.abc import Callable

import jax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array


def equally_varying(*operands: Array) -> tuple[Array, ...]:
    """Returns the operands marked as varying over the same mesh axes.

    `shard_map` requires gradients that vary as their operands do. The mark's transpose
    is a sum: the gradient of an operand that devices share is added up.
    """
    varying = [jax.typeof(x).mat.varying for x in operands]
    union = frozenset().union(*varying)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying")
        for x, axes in zip(operands, varying, strict=True)
    )


def by_kernel(run: Callable, *operands):
    """Returns `run(*operands)`, a launch; under `vmap` one call follows another.

    Args:
        run: a function of pytrees of arrays; the leaves of its result need not be
            marked as varying over a mesh as the operands are.
        operands: its arguments; None for an absent operand.
    """
    leaves = jax.tree.leaves(operands)
    outputs = one_by_one(run, *operands)
    return jax.tree.map(lambda x: equally_varying(x, *leaves)[0], outputs)


def one_by_one(kernel: Callable, *args, **kwargs):
    """Returns `kernel(*args, **kwargs)`; under `vmap` one call follows another.

    JAX would give a batched kernel another grid axis, which persistent kernels do not
    expect: they count their tiles.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    out_trees = []

    @sequential_vmap
    def call(*leaves):
        args, kwargs = jax.tree.unflatten(tree, leaves)
        out, out_tree = jax.tree.flatten(kernel(*args, **kwargs))
        out_trees.append(out_tree)
        return tuple(out)

    out = call(*leaves)
    return jax.tree.unflatten(out_trees[0], out)
