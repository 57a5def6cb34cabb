"""Norms of joined embeddings: operands, results, and what they should be."""

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.ops import residual
from loka_jax.ops.joined_norm import joined_norm
from tests import support
from tests.support import oracle, tailed


def operands(counts, d, dtype):
    """Returns parts, x and the gradient of the result, of 11 examples."""
    parts = tuple(
        support.normal(11, count, d, seed=i, dtype=dtype)
        for i, count in enumerate(counts)
    )
    x, dy = (support.normal(11, sum(counts), d, seed=i, dtype=dtype) for i in (8, 9))
    return parts, x, dy


def results(parts, x, dy, *, in_parts=False, provider="xla"):
    """Returns the norm and the gradients of the parts and x."""
    counts = [part.shape[1] for part in parts]

    def run(parts, x):
        if in_parts:
            x = residual.beside(x, residual.cut(x, tuple(counts)))
        return joined_norm(parts, x, implementation=provider)

    y, pull = jax.vjp(run, parts, x)
    return y, pull(dy)


def assert_is_a_block_norm(counts, d, *, dtype, limit, run=None, **options):
    """Asserts that results are those of a block norm of the sum, in float64."""
    parts, x, dy = operands(counts, d, dtype)
    run = run or jax.jit(lambda *args: results(*args, **options))
    y, (dparts, dx) = run(parts, x, dy)
    z = oracle.in_float64(jnp.concatenate(parts, axis=1)) + oracle.in_float64(x)
    xhat, rate = oracle.normalized(z, "block")
    dz = oracle.norm_gradient(oracle.in_float64(dy), xhat, rate, "block")
    their_dparts = tuple(np.split(dz, np.cumsum(counts)[:-1], axis=1))
    tailed.assert_close((y, dparts, dx), (xhat, their_dparts, dz), limit)
