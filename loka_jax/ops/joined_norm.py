"""The end of a layer of embeddings: `norm([part_1; ...; part_p] + x)`.

In a layer of Wukong this moves more bytes than the products and tails of its FMB in
FP8. Triton reads and writes each array once, forward and backward, and concatenates
nothing.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import triton
from loka_jax.mapped import equally_varying
from loka_jax.normed import NO_VECTORS, NormName, NormVectors
from loka_jax.ops import residual
from loka_jax.ops.residual import Residual
from loka_jax.triton import joined_norm as _triton

EPSILON = 1e-6


def joined_norm(
    parts: tuple[Float[Array, "B _ d"], ...],
    x: Float[Array, "B n d"] | Residual,
    vectors: NormVectors = NO_VECTORS,
    *,
    norm: NormName = "block",
    implementation: triton.Implementation | None = None,
) -> Float[Array, "B n d"]:
    """Returns `gamma norm(z) + beta` over d, z = [part_1; ...; part_p] + x.

        layer        norm(z) = (z - mean(z)) rsqrt(mean((z - mean(z))^2) + 1e-6)
        rms, block   norm(z) = z rsqrt(mean(z^2) + 1e-6)

    Differentiable; computed in float32.

    Args:
        parts: embeddings, n in all.
        x: the residual; a `Residual` gets its gradient in parts.
        vectors: gamma and beta, of d values.
        implementation: as in `embedding.sum_by_row`; Triton takes bfloat16 alone.

    Raises:
        ValueError: if the parts have not n embeddings of x's d, d is above 256, or
            Triton is required and cannot run.
    """
    x, rows = x if isinstance(x, Residual) else Residual(x, ())
    count = sum(part.shape[1] for part in parts)
    dim = x.shape[2]
    if count != x.shape[1] or any(part.shape[2] != dim for part in parts):
        shapes = [part.shape for part in parts]
        raise ValueError(f"joined_norm: parts of {shapes} do not make up x, {x.shape}.")
    if dim > _triton.NORM_BLOCK:
        raise ValueError(f"joined_norm: d={dim} is above {_triton.NORM_BLOCK}.")
    provider = triton.chosen(implementation, _triton.why_not(x, *parts), "joined_norm")
    counts = tuple(part.shape[1] for part in parts)
    static = _Static(provider, norm, counts, in_parts=bool(rows))
    leaves, tree = jax.tree.flatten((parts, x, vectors))
    parts, x, vectors = jax.tree.unflatten(tree, equally_varying(*leaves))
    return _run(static, parts, x, rows, vectors)


class _Static(NamedTuple):
    """The static arguments.

    Attributes:
        in_parts: the gradient of x is that of the rows of a `Residual`.
    """

    provider: triton.Implementation
    norm: NormName
    counts: tuple[int, ...]
    in_parts: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static: _Static, parts, x, rows, vectors):
    del rows
    return _norm(static, parts, x, vectors, is_kept=False)[0]


def _norm(static: _Static, parts, x, vectors, *, is_kept: bool) -> tuple[Any, ...]:
    """Returns the result, and xhat and rstd."""
    if static.provider == "triton":
        run = functools.partial(_triton.joined_norm, parts, x, vectors)
        return run(norm=static.norm, epsilon=EPSILON, is_kept=is_kept)
    z = jnp.concatenate(parts, axis=1).astype(jnp.float32) + x.astype(jnp.float32)
    if static.norm == "layer":
        z -= jnp.mean(z, axis=2, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(z * z, axis=2) + EPSILON)
    y = xhat = z * rstd[:, :, None]
    if vectors.gamma is not None:
        y = y * vectors.gamma[None, None]
    if vectors.beta is not None:
        y = y + vectors.beta[None, None]
    return y.astype(x.dtype), xhat.astype(x.dtype), rstd


def _forward(static: _Static, parts, x, rows, vectors):
    del rows
    y, xhat, rstd = _norm(static, parts, x, vectors, is_kept=True)
    return y, (xhat, rstd, vectors)


def _backward(static: _Static, residuals, dy):
    (xhat, rstd, vectors), norm = residuals, static.norm
    if static.provider == "triton":
        run = functools.partial(_triton.joined_norm_backward, dy, xhat, rstd, vectors)
        with_dx = not static.in_parts
        dparts, dx, sums = run(counts=static.counts, norm=norm, with_dx=with_dx)
    else:
        g, v = dy.astype(jnp.float32), xhat.astype(jnp.float32)
        dgamma = None if vectors.gamma is None else jnp.sum(g * v, axis=(0, 1))
        dbeta = None if vectors.beta is None else jnp.sum(g, axis=(0, 1))
        sums = NormVectors(None, dgamma, dbeta)
        g = g if vectors.gamma is None else g * vectors.gamma[None, None]
        along = jnp.mean(g * v, axis=2, keepdims=True)
        g = g - jnp.mean(g, axis=2, keepdims=True) if norm == "layer" else g
        dx = ((g - v * along) * rstd[:, :, None]).astype(dy.dtype)
        dparts = residual.cut(dx, static.counts)
    return (dparts, None, dparts, sums) if static.in_parts else (dparts, dx, (), sums)


_run.defvjp(_forward, _backward)
