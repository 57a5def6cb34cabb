"""Gated norms: operands, results, and what they should be."""

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.normed import NormVectors
from loka_jax.ops.gated_norm import gated_norm
from loka_jax.tails import Dropout
from loka_jax.unbiased import uniform
from tests import support
from tests.support import oracle, tailed

ROWS, WORDS = 37, np.asarray([5, 6], np.uint32)


def operands(n, dtype):
    """Returns u and further columns, x, the result's gradient, and vectors."""
    widths = enumerate((n + 3, n, 3 * n))
    u, x, dy = (support.normal(ROWS, k, seed=i, dtype=dtype) for i, k in widths)
    gamma, beta = (support.normal(n, seed=i) for i in (3, 4))
    return u, x, dy, NormVectors(None, gamma, beta)


def results(u, x, dy, vectors, *, rate=0.0, provider="xla"):
    """Returns the gated norm and the gradients of u, x and the vectors."""
    dropout = Dropout(jnp.asarray(WORDS), rate) if rate else None

    def run(u, x, vectors):
        return gated_norm(u, x, vectors, dropout, implementation=provider)

    y, pull = jax.vjp(run, u, x, vectors)
    du, *others = pull(dy)
    return y, (du[:, : x.shape[1]], *others)


def assert_is_gated_norm(n, rate, *, dtype, limit, run):
    """Asserts that results are those of the equations, in float64."""
    given = operands(n, dtype)
    y, gradients = run(*given)
    u, x, dy, v = jax.tree.map(oracle.in_float64, given)
    u = u[:, :n]
    share = 1 / (1 + np.exp(-u))
    a, slope = u * share, share + u * share * (1 - share)
    xhat, rstd = oracle.normalized(x, "layer")
    normed = oracle.affine(xhat, v)
    drawn = np.asarray(uniform(jnp.asarray(WORDS), jnp.arange(ROWS), 3 * n))
    kept = np.where(drawn < rate, 0.0, 1 / (1 - rate))
    e, f, g = np.split(dy * kept, 3, axis=1)
    dv = a * g
    dx = f + oracle.norm_gradient(dv * v.gamma, xhat, rstd, "layer")
    vectors = NormVectors(None, (dv * xhat).sum(0), dv.sum(0))
    theirs = (e + normed * g) * slope, dx, vectors
    joined = np.concatenate([a, x, normed * a], axis=1) * kept
    tailed.assert_close((y, *gradients), (joined, *theirs), limit)
