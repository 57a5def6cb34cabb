"""Norm of joined embeddings plus a residual by Triton: a pass over each part.

    forward     y = norm([part_1; ...; part_p] + x)
    backward    dz = rstd (dy - y mean(dy y))    dx = dz    dpart_i = rows of dz

Rows are embeddings of d values, whose mean square is made 1 (a block norm within d).
The launches of the parts write to the same array, so that nothing is concatenated.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.normed import NORM_BLOCK
from loka_jax.triton.launch import launch, power_of_two, require_triton

_BLOCK_M, _WARPS = 32, 4
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
    parts: tuple[Float[Array, "B _ d"], ...], x: Float[Array, "B n d"], epsilon: float
) -> tuple[Float[Array, "B n d"], Float[Array, "B n"]]:
    """Returns y in bfloat16, and float32 rstd.

    Raises:
        ImportError: if jax-triton is not installed.
    """
    require_triton()
    from loka_jax.triton import joined_norm_kernel  # not above: it imports Triton

    types = [
        jax.ShapeDtypeStruct(x.shape, jnp.bfloat16),
        jax.ShapeDtypeStruct(x.shape[:2], jnp.float32),
    ]
    y, rstd, first = x, x, 0  # of the first launch: any arrays
    for part in parts:
        y, rstd = launch(
            joined_norm_kernel.joined_norm_kernel,
            *(part, x, y, rstd),
            outputs=types,
            aliases={2: 0, 3: 1} if first else {},
            constants=_constants(part, x, first) | dict(epsilon=epsilon),
            **_options(part),
        )
        first += part.shape[1]
    return y, rstd


def joined_norm_backward(
    dy: Float[Array, "B n d"],
    y: Float[Array, "B n d"],
    rstd: Float[Array, "B n"],
    counts: tuple[int, ...],
    *,
    with_dx: bool = True,
) -> tuple[tuple[Float[Array, "B _ d"], ...], Float[Array, "B n d"] | None]:
    """Returns the gradients of the parts and of x, in bfloat16.

    Args:
        with_dx: also write that of x, in which those of the parts are once more.

    Raises:
        ImportError: if jax-triton is not installed.
    """
    require_triton()
    from loka_jax.triton import joined_norm_kernel as kernels

    batch, _, d = y.shape
    dx, dparts, first = y, [], 0
    for count in counts:
        part = jax.ShapeDtypeStruct((batch, count, d), jnp.bfloat16)
        options: dict[str, Any] = dict(constants=_constants(part, y, first))
        options |= _options(part)
        if with_dx:
            dx, dpart = launch(
                kernels.joined_norm_backward_kernel,
                *(dy, y, rstd, dx),
                outputs=[jax.ShapeDtypeStruct(y.shape, jnp.bfloat16), part],
                aliases={3: 0} if first else {},
                **options,
            )
        else:
            kernel = kernels.joined_norm_parts_backward_kernel
            (dpart,) = launch(kernel, dy, y, rstd, outputs=[part], **options)
        dparts.append(dpart)
        first += count
    return tuple(dparts), dx if with_dx else None


def _constants(part, x, first: int) -> dict[str, int]:
    batch, count, d = part.shape
    return dict(
        rows=batch * count,
        count=count,
        first=first,
        n=x.shape[1],
        d=d,
        block_m=_BLOCK_M,
        block_n=max(power_of_two(d), _MIN_COLUMNS),
    )


def _options(part) -> dict[str, int]:
    rows = part.shape[0] * part.shape[1]
    return dict(grid=math.ceil(rows / _BLOCK_M), num_warps=_WARPS, num_stages=1)
