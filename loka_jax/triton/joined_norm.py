"""Norm of joined embeddings plus a residual by Triton, in one pass either way.

    forward     y = gamma xhat + beta    xhat = norm(z)    z = [part_1; ...; part_p] + x
    backward    dz = rstd (g - xhat mean(g xhat))          g = gamma dy
                dx = dz    dpart_i = rows of dz    dgamma, dbeta: sums over rows

Rows are embeddings of d values; a layer norm also takes the mean away, of z and of g.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.normed import NO_VECTORS, NORM_BLOCK, NormName, NormVectors
from loka_jax.triton.launch import power_of_two, require_triton
from loka_jax.triton.trees import launch_tree, static

# The fastest on an H200 of 16,384 x 64 x 128 and of 16,384 x 96 x 160.
_WARPS, _BLOCK_M = 4, 8
# With sums for gamma and beta programs take rows several times, and load those that
# follow while they compute: else they wait for memory.
_SUMS = dict(block_m=32, stages=3)
_PROGRAMS_OF_SUMS = 264
_MIN_COLUMNS = 16


def why_not(x: Array, *parts: Array) -> str | None:
    """Returns why these operands are not served, or None if they are."""
    for array in (x, *parts):
        if array.dtype != jnp.bfloat16:
            return f"{array.dtype.name} is not bfloat16"
    if not 0 < x.shape[2] <= NORM_BLOCK:
        return f"d={x.shape[2]} is not 1 to {NORM_BLOCK}"
    return None


def joined_norm(
    parts: tuple[Float[Array, "B _ d"], ...],
    x: Float[Array, "B n d"],
    vectors: NormVectors = NO_VECTORS,
    *,
    norm: NormName,
    epsilon: float,
    is_kept: bool = True,
) -> tuple[Array, Array | None, Array | None]:
    """Returns y and xhat [B, n, d] in bfloat16, and float32 rstd [B, n].

    Args:
        is_kept: return xhat and rstd, for the backward pass; None otherwise. Without
            gamma and beta xhat is y.

    Raises:
        ImportError: if jax-triton is not installed.
    """
    require_triton()
    from loka_jax.triton.joined_norm_kernel import joined_norm_kernel  # imports Triton

    is_affine = (vectors.gamma, vectors.beta) != (None, None)
    out: Any = static(
        y=_type(x.shape),
        xhat=_type(x.shape) if is_kept and is_affine else None,
        rstd=_type(x.shape[:2], jnp.float32) if is_kept else None,
    )
    given = static(parts=parts, x=x, vectors=vectors)
    counts = [part.shape[1] for part in parts]
    of = _constants(counts, x, norm=norm, epsilon=epsilon)
    how = dict(grid=of.steps, num_warps=_WARPS)
    out = launch_tree(joined_norm_kernel, given, out, of, **how)
    xhat = out.xhat if is_affine or not is_kept else out.y
    return out.y, xhat, out.rstd


def joined_norm_backward(
    dy: Float[Array, "B n d"],
    xhat: Float[Array, "B n d"],
    rstd: Float[Array, "B n"],
    vectors: NormVectors = NO_VECTORS,
    *,
    counts: tuple[int, ...],
    norm: NormName,
    with_dx: bool = True,
) -> tuple[tuple[Array, ...], Array | None, NormVectors]:
    """Returns the gradients of the parts and of x, in bfloat16, and of the vectors.

    Args:
        with_dx: also write that of x, in which those of the parts are once more.

    Raises:
        ImportError: if jax-triton is not installed.
    """
    require_triton()
    from loka_jax.triton import joined_norm_kernel as kernels

    batch, _, d = xhat.shape
    has_sums = (vectors.gamma, vectors.beta) != (None, None)
    of = _constants(counts, xhat, norm=norm, **_SUMS if has_sums else {})
    programs = min(of.steps, _PROGRAMS_OF_SUMS) if has_sums else of.steps
    sums = _type((programs, d), jnp.float32)
    out: Any = static(
        parts=tuple(_type((batch, count, d)) for count in counts),
        dx=_type(xhat.shape) if with_dx else None,
        gamma=None if vectors.gamma is None else sums,
        beta=None if vectors.beta is None else sums,
    )
    given = static(dy=dy, xhat=xhat, rstd=rstd, gamma=vectors.gamma)
    how = dict(grid=programs, num_warps=_WARPS)
    out = launch_tree(kernels.joined_norm_backward_kernel, given, out, of, **how)
    gamma, beta = (None if x is None else x.sum(axis=0) for x in (out.gamma, out.beta))
    return out.parts, out.dx, NormVectors(None, gamma, beta)


def _constants(
    counts, x, *, block_m: int = _BLOCK_M, stages: int = 1, **others: Any
) -> Any:
    (batch, n, d), widths = x.shape, _widths(x.shape[2])
    return static(
        rows=batch * n,
        steps=math.ceil(batch * n / block_m),
        n=n,
        d=d,
        firsts=_starts(counts),
        block_m=block_m,
        stages=stages,
        widths=widths,
        starts=_starts(widths),
        **others,
    )


def _widths(d: int) -> tuple[int, ...]:
    """Returns the columns of one tile, or of two where these waste fewer."""
    whole = max(power_of_two(d), _MIN_COLUMNS)
    half = whole // 2
    rest = max(power_of_two(d - half), _MIN_COLUMNS)
    return (whole,) if rest >= half else (half, rest)


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes[:-1], initial=0))


def _type(shape: tuple[int, ...], dtype: DTypeLike = jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)
