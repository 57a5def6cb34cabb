"""The end of a layer of embeddings: `norm([part_1; ...; part_p] + x)`, a block norm.

In a layer of Wukong this moves more bytes than the products and tails of its FMB in
FP8. Triton reads and writes each array once, forward and backward, and concatenates
nothing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import triton
from loka_jax.mapped import by_kernel, equally_varying
from loka_jax.ops import residual
from loka_jax.ops.residual import Residual
from loka_jax.triton import joined_norm as _triton

EPSILON = 1e-6


def joined_norm(
    parts: tuple[Float[Array, "B _ d"], ...],
    x: Float[Array, "B n d"] | Residual,
    *,
    implementation: triton.Implementation | None = None,
) -> Float[Array, "B n d"]:
    """Returns `z rsqrt(mean(z^2) + 1e-6)` over d, z = [part_1; ...; part_p] + x.

    Differentiable; computed in float32. The same as a block norm for d up to 256.

    Args:
        parts: embeddings, n in all.
        x: the residual; a `Residual` gets its gradient in parts.
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
    static = _Static(provider, counts, in_parts=bool(rows))
    *varying, x = equally_varying(*parts, x)
    return _run(static, tuple(varying), x, rows)


class _Static(NamedTuple):
    """The static arguments.

    Attributes:
        in_parts: the gradient of x is that of the rows of a `Residual`.
    """

    provider: triton.Implementation
    counts: tuple[int, ...]
    in_parts: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static: _Static, parts, x, rows):
    return _forward(static, parts, x, rows)[0]


def _forward(static: _Static, parts, x, rows):
    if static.provider == "triton":
        run = functools.partial(_triton.joined_norm, epsilon=EPSILON)
        y, rstd = by_kernel(run, parts, x)
    else:
        z = jnp.concatenate(parts, axis=1).astype(jnp.float32) + x.astype(jnp.float32)
        rstd = jax.lax.rsqrt(jnp.mean(z * z, axis=2) + EPSILON)
        y = (z * rstd[:, :, None]).astype(x.dtype)
    return y, (y, rstd)


def _backward(static: _Static, residuals, dy):
    (y, rstd), (provider, counts, in_parts) = residuals, static
    if provider == "triton":
        run = functools.partial(_triton.joined_norm_backward, counts=counts)
        run = functools.partial(run, with_dx=not in_parts)
        dparts, dx = by_kernel(run, dy, y, rstd)
    else:
        g, v = dy.astype(jnp.float32), y.astype(jnp.float32)
        g = g - v * jnp.mean(g * v, axis=2, keepdims=True)
        dx = (g * rstd[:, :, None]).astype(dy.dtype)
        dparts = residual.cut(dx, counts)
    return (dparts, None, dparts) if in_parts else (dparts, dx, ())


_run.defvjp(_forward, _backward)
