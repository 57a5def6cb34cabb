"""HSTU's gated norm by Triton, in one pass either way: see `ops.gated_norm`.

    forward     y = drop([a; x; v a])       v = gamma xhat + beta    xhat = norm(x)
                                            a = silu(u)
    backward    [e; f; g] = drop(dy)
                du = (e + v g) silu'(u)     dv = a g
                dx = f + rstd (h - mean(h) - xhat mean(h xhat)),    h = gamma dv
                dgamma, dbeta: sums of dv xhat and dv over rows

xhat and a are computed again from x and u, which the backward pass reads anyway.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.normed import NO_VECTORS, NormVectors
from loka_jax.tails import Dropout
from loka_jax.triton.launch import power_of_two, require_triton
from loka_jax.triton.trees import launch_tree, static

_MIN_COLUMNS, _MAX_COLUMNS = 16, 4096


class Tile(NamedTuple):
    """The tunable parameters: elements of a tile, its warps, and of loops over tiles.

    Attributes:
        programs: at most so many, which take tiles in turn; None for one a tile.
        stages: of tiles that are loaded while others are computed.
    """

    elements: int
    num_warps: int
    programs: int | None = None
    stages: int = 1


# The fastest on an H200 of 69,120 x 512, 32,768 x 1,024 and 65,536 x 256, or near it.
FORWARD = Tile(512, 2)
# Programs take tiles in turn, so that each has one sum for gamma and beta.
BACKWARD = Tile(1024, 4, programs=528, stages=3)


def why_not(x: Array) -> str | None:
    """Returns why these rows are not served, or None if they are."""
    if x.dtype != jnp.bfloat16:
        return f"{x.dtype.name} is not bfloat16"
    if not 0 < x.shape[1] <= _MAX_COLUMNS:
        return f"n={x.shape[1]} is not 1 to {_MAX_COLUMNS}"
    return None


def gated_norm(
    u: Float[Array, "C _"],
    x: Float[Array, "C n"],
    vectors: NormVectors = NO_VECTORS,
    dropout: Dropout | None = None,
    *,
    epsilon: float,
    tile: Tile = FORWARD,
) -> Float[Array, "C 3*n"]:
    """Returns y in bfloat16.

    Raises:
        ImportError: if jax-triton is not installed.
    """
    require_triton()
    from loka_jax.triton.gated_norm_kernel import gated_norm_kernel  # imports Triton

    rows, n = x.shape
    given = static(u=u, x=x, vectors=vectors, dropout=dropout)
    of = _constants(x, tile, epsilon)
    how = dict(grid=of.steps, num_warps=_warps(of, tile))
    out = static(y=_type((rows, 3 * n)))
    return launch_tree(gated_norm_kernel, given, out, of, **how).y


def gated_norm_backward(
    dy: Float[Array, "C _"],
    u: Float[Array, "C _"],
    x: Float[Array, "C n"],
    vectors: NormVectors = NO_VECTORS,
    dropout: Dropout | None = None,
    *,
    epsilon: float,
    tile: Tile = BACKWARD,
) -> tuple[Array, Array, NormVectors]:
    """Returns the gradients of u and x, in bfloat16, and of the vectors.

    Columns of that of u past those of x are not written.

    Raises:
        ImportError: if jax-triton is not installed.
    """
    require_triton()
    from loka_jax.triton import gated_norm_kernel as kernels

    of = _constants(x, tile, epsilon)
    programs = min(of.steps, tile.programs or of.steps)
    sums = _type((programs, x.shape[1]), jnp.float32)
    out: Any = static(
        u=_type(u.shape),
        x=_type(x.shape),
        gamma=None if vectors.gamma is None else sums,
        beta=None if vectors.beta is None else sums,
    )
    given = static(dy=dy, u=u, x=x, vectors=vectors, dropout=dropout)
    how = dict(grid=programs, num_warps=_warps(of, tile))
    out = launch_tree(kernels.gated_norm_backward_kernel, given, out, of, **how)
    gamma, beta = (None if s is None else s.sum(axis=0) for s in (out.gamma, out.beta))
    return out.u, out.x, NormVectors(None, gamma, beta)


def _constants(x: Array, tile: Tile, epsilon: float) -> Any:
    rows, n = x.shape
    block_n = max(power_of_two(n), _MIN_COLUMNS)
    block_m = max(tile.elements // block_n, 1)
    return static(
        rows=rows,
        n=n,
        block_m=block_m,
        block_n=block_n,
        steps=math.ceil(rows / block_m),
        stages=tile.stages,
        epsilon=epsilon,
    )


def _warps(of: Any, tile: Tile) -> int:
    """Returns the warps of a program: more of rows that are longer than a tile."""
    return tile.num_warps * max(of.block_n // tile.elements, 1)


def _type(shape: tuple[int, ...], dtype: DTypeLike = jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)
