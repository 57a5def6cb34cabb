"""Calls of Triton's kernels that work under `vmap` and `shard_map`."""

from collections.abc import Callable

import jax

from loka_jax.ops.kernels import one_by_one
from loka_jax.ops.products import equally_varying


def by_triton(run: Callable, *operands):
    """Returns `run(*operands)`; under `vmap` one call follows another.

    Args:
        run: of pytrees of arrays; returns one, whose leaves do not say that they vary
            over a mesh as the operands do.
        operands: None for what is absent.
    """
    leaves = jax.tree.leaves(operands)
    found = one_by_one(run, *operands)
    return jax.tree.map(lambda x: equally_varying(x, *leaves)[0], found)
