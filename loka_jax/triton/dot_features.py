"""Dot products of all pairs of an example's vectors by Triton, in one pass each way.

With z the bottom vector, if there is one, and the embeddings,

    out = [bottom; <z_i, z_j> for i > j, row by row; zeros]              [B, p]
    dz  = S z,    S_ij = S_ji = g_ij, S_ii = 0                           [B, n, D]

or the products of another triangle of pairs, in which S_ii = 2 g_ii if it has i = j.

Products run on the tensor cores and are summed in float32, each rounded once. XLA makes
a pass over [B, n, n] and [B, n, D] for every step; here only the operands and the
result touch memory.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.triton.launch import power_of_two, require_triton
from loka_jax.triton.trees import launch_tree, static

# Which pairs there are, row by row.
Pairs = Literal["i > j", "i >= j", "i < j", "i <= j"]

_MAX_VECTORS = 64
_MAX_DIM = 256
_MIN_TILE = 16  # of the tensor core
# Tuned. A program's warps share an example, and its examples follow each other: many
# small programs hide each other's latencies, several examples amortize the launch.
_EXAMPLES = 4
_VALUES = 160  # per thread; more values take more warps


def why_not(batch: int, n: int, dim: int, dtype: DTypeLike) -> str | None:
    """Returns why n vectors per example are not served, or None if they are."""
    if batch <= 0 or dim <= 0:
        return f"B={batch}, D={dim}: there is nothing to multiply"
    if n < 2:
        return f"n={n}: there are no pairs"
    if n > _MAX_VECTORS:
        return f"n={n} is more than {_MAX_VECTORS}"
    if dim > _MAX_DIM:
        return f"D={dim} is more than {_MAX_DIM}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"{jnp.dtype(dtype)} is not bfloat16"
    return None


def dot_features(
    bottom: Float[Array, "B D"] | None,
    embeddings: Float[Array, "B F D"],
    *,
    width: int,
    pairs: Pairs = "i > j",
) -> Float[Array, "B p"]:
    """Returns the bottom vector, the products of pairs and zeros, p = `width`.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    sizes = _sizes(bottom, embeddings, width, pairs)
    end = count(sizes["n"], pairs)
    end += sizes["dim"] if sizes["has_bottom"] else 0
    require_triton()
    from loka_jax.triton import dot_features_kernel  # not above: it imports Triton

    return launch_tree(
        dot_features_kernel.dot_features_kernel,
        static(bottom=bottom, embeddings=embeddings),
        jax.ShapeDtypeStruct((sizes["batch"], width), embeddings.dtype),
        static(**sizes, tile_rest=power_of_two(max(width - end, 1))),
        **_launch_options(sizes, copies=1),
    )


def dot_features_backward(
    bottom: Float[Array, "B D"] | None,
    embeddings: Float[Array, "B F D"],
    g: Float[Array, "B p"],
    *,
    pairs: Pairs = "i > j",
) -> tuple[Float[Array, "B D"] | None, Float[Array, "B F D"]]:
    """Returns the gradients of `bottom` and `embeddings`.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    sizes = _sizes(bottom, embeddings, g.shape[1], pairs)
    require_triton()
    from loka_jax.triton import dot_features_kernel

    x = dict(bottom=bottom, embeddings=embeddings)
    types = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, g.dtype), x)
    gradients = launch_tree(
        dot_features_kernel.dot_features_backward_kernel,
        static(**x, g=g),
        static(**types),
        static(**sizes),
        **_launch_options(sizes, copies=2),
    )
    return gradients.bottom, gradients.embeddings


def count(n: int, pairs: Pairs) -> int:
    """Returns the number of pairs of n vectors."""
    return n * (n - 1) // 2 + ("=" in pairs) * n


def _sizes(bottom, embeddings, width, pairs: Pairs) -> dict[str, int | bool]:
    """Returns the constants of both kernels.

    Raises:
        ValueError: if the operands are not served.
    """
    batch, fields, dim = embeddings.shape
    n = fields + (bottom is not None)
    reason = why_not(batch, n, dim, embeddings.dtype)
    if reason is not None:
        raise ValueError(f"dot_features: {reason}.")
    return dict(
        batch=batch,
        n=n,
        dim=dim,
        width=width,
        has_bottom=bottom is not None,
        is_upper="<" in pairs,
        has_equal="=" in pairs,
        examples=_EXAMPLES,
        tile_n=max(power_of_two(n), _MIN_TILE),
        tile_dim=max(power_of_two(dim), _MIN_TILE),
    )


def _launch_options(sizes, *, copies: int) -> dict[str, Any]:
    """Returns grid and warps of a kernel.

    `copies` counts the sets of vectors and products in registers. Few values take a
    single warp: several wait for each other at every step.
    """
    values = copies * sizes["tile_n"] * (sizes["tile_n"] + sizes["tile_dim"])
    return dict(
        grid=-(-sizes["batch"] // _EXAMPLES),
        num_warps=power_of_two(-(-values // (32 * _VALUES))),
    )
