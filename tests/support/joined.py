"""Norms of joined embeddings: operands, results, and what they should be."""

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.ops import residual
from loka_jax.ops.joined_norm import joined_norm
from tests import support
from tests.support import tailed


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
    z = np.asarray(jnp.concatenate(parts, axis=1), np.float64) + np.asarray(
        x, np.float64
    )
    flat = z.reshape(-1, d)
    xhat, rate = tailed.normalized(flat, "block")
    dz = tailed.norm_gradient(
        np.asarray(dy, np.float64).reshape(-1, d), xhat, rate, "block"
    ).reshape(z.shape)
    ends = np.cumsum(counts)[:-1]
    expected = xhat.reshape(z.shape), tuple(np.split(dz, ends, axis=1)), dz
    tailed.assert_close((y, dparts, dx), expected, limit)
