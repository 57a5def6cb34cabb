"""What the second product of an HSTU layer reads: a norm times a gate, and its parts.

    y = drop([a; x; (gamma norm(x) + beta) a]),    a = silu(u)

By XLA this takes several passes over arrays as wide as the product's input, which wait
for memory. Triton reads u and x once and writes y once; the backward pass reads u, x
and the gradient, and draws dropout again, so that nothing else is kept.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from loka_jax import triton
from loka_jax.mapped import equally_varying
from loka_jax.normed import NO_VECTORS, Epilogue, NormVectors
from loka_jax.tails import Dropout
from loka_jax.triton import gated_norm as _triton
from loka_jax.xla.dense_norm import affine, normalize
from loka_jax.xla.tails import dropped

_NORM = Epilogue("layer")


def gated_norm(
    u: Float[Array, "C _"],
    x: Float[Array, "C n"],
    vectors: NormVectors = NO_VECTORS,
    dropout: Dropout | None = None,
    *,
    implementation: triton.Implementation | None = None,
) -> Float[Array, "C 3*n"]:
    """Returns `drop([a; x; norm(x) a])` in the dtype of x, norm being a layer norm.

    Differentiable; computed in float32.

    Args:
        u: may have further columns, which are not read; their gradient is any.
        vectors: gamma and beta of the norm.
        dropout: of the result; None for none.
        implementation: as in `embedding.sum_by_row`; Triton takes bfloat16 alone.

    Raises:
        ValueError: if u has fewer columns than x, other rows or another dtype, or
            Triton is required and cannot run.
    """
    if u.shape[1] < x.shape[1] or (len(u), u.dtype) != (len(x), x.dtype):
        raise ValueError(
            f"gated_norm: u, {u.dtype.name} {u.shape}, must begin with columns for "
            f"those of x, {x.dtype.name} {x.shape}."
        )
    provider = triton.chosen(implementation, _triton.why_not(x), "gated_norm")
    words, rate = (None, 0.0) if dropout is None else (dropout.words, dropout.rate)
    leaves, tree = jax.tree.flatten((u, x, vectors, words))
    operands = jax.tree.unflatten(tree, equally_varying(*leaves))
    return _run(_Static(provider, _NORM.epsilon, rate), *operands)


class _Static(NamedTuple):
    provider: triton.Implementation
    epsilon: float
    rate: float

    def dropout(self, words: UInt32[Array, "2"] | None) -> Dropout | None:
        return None if words is None else Dropout(words, self.rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static: _Static, u, x, vectors, words):
    dropout = static.dropout(words)
    if static.provider == "triton":
        return _triton.gated_norm(u, x, vectors, dropout, epsilon=static.epsilon)
    return _by_xla(u, x, vectors, dropout)


def _by_xla(u, x, vectors, dropout):
    u, rows = u[:, : x.shape[1]].astype(jnp.float32), x.astype(jnp.float32)
    gate = jax.nn.silu(u)
    normed, _ = normalize(rows, _NORM)
    parts = gate, rows, affine(normed, vectors) * gate
    return dropped(jnp.concatenate(parts, axis=1), dropout).astype(x.dtype)


def _forward(static: _Static, *operands):
    return _run(static, *operands), operands


def _backward(static: _Static, operands, dy):
    u, x, vectors, words = operands
    dropout = static.dropout(words)
    if static.provider == "triton":
        run = functools.partial(_triton.gated_norm_backward, epsilon=static.epsilon)
        return *run(dy, u, x, vectors, dropout), None
    run = functools.partial(_by_xla, dropout=dropout)
    _, pull = jax.vjp(run, u, x, vectors)
    return *pull(dy), None


_run.defvjp(_forward, _backward)
