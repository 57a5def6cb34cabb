"""Norms of joined embeddings: operands, results, and what they should be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from loka_jax.normed import NormVectors
from loka_jax.ops import residual
from loka_jax.ops.joined_norm import joined_norm
from tests import support
from tests.support import oracle, tailed


def operands(counts, d, dtype, norm="block"):
    """Returns parts, x, the gradient of the result, and vectors, of 11 examples."""
    parts = tuple(
        support.normal(11, count, d, seed=i, dtype=dtype)
        for i, count in enumerate(counts)
    )
    x, dy = (support.normal(11, sum(counts), d, seed=i, dtype=dtype) for i in (8, 9))
    names = {"layer": ("gamma", "beta"), "rms": ("gamma",)}.get(norm, ())
    vectors = {name: support.normal(d, seed=i) for i, name in enumerate(names)}
    return parts, x, dy, NormVectors(**vectors)


def results(parts, x, dy, vectors, *, norm, in_parts=False, provider="xla"):
    """Returns the norm and the gradients of the parts, x and the vectors."""
    counts = [part.shape[1] for part in parts]

    def run(parts, x, vectors):
        if in_parts:
            x = residual.beside(x, residual.cut(x, tuple(counts)))
        return joined_norm(parts, x, vectors, norm=norm, implementation=provider)

    y, pull = jax.vjp(run, parts, x, vectors)
    return y, pull(dy)


def assert_is_a_norm(counts, d, norm, *, dtype, limit, run=None, **options):
    """Asserts that results are those of a norm of the sum, in float64."""
    parts, x, dy, vectors = operands(counts, d, dtype, norm)
    run = run or jax.jit(functools.partial(results, norm=norm, **options))
    y, gradients = run(parts, x, dy, vectors)
    z = oracle.in_float64(jnp.concatenate(parts, axis=1)) + oracle.in_float64(x)
    xhat, rate = oracle.normalized(z, norm)
    g, v = oracle.in_float64(dy), jax.tree.map(oracle.in_float64, vectors)
    dgamma = None if v.gamma is None else (g * xhat).sum((0, 1))
    dbeta = None if v.beta is None else g.sum((0, 1))
    dz = oracle.norm_gradient(g if v.gamma is None else g * v.gamma, xhat, rate, norm)
    their_dparts = tuple(np.split(dz, np.cumsum(counts)[:-1], axis=1))
    theirs = their_dparts, dz, NormVectors(None, dgamma, dbeta)
    tailed.assert_close((y, *gradients), (oracle.affine(xhat, v), *theirs), limit)
