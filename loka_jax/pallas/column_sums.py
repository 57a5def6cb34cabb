"""Sums over all rows of a launch, of values for every column of tiles of rows.

A lane has the same columns in every tile. So its sums stay in registers, a row for each
warp, until the last tile; then they are added over the warps of a CTA, in a fixed order
and without atomics. The sums of CTAs are for the caller to add.

Rows must lie in one warp, or be folded: 32 or 128 lanes.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.pallas.rows import WARPS, RowLayout


def area_bytes(layout: RowLayout) -> int:
    """Returns the shared memory that sums take for each warpgroup."""
    return 4 * WARPS * layout.columns


def scratch(layout: RowLayout) -> dict[str, Any]:
    """Returns the memory `write` takes."""
    warpgroups = layout.settings.warpgroups
    return dict(
        area=plgpu.SMEM((warpgroups, WARPS, layout.columns), jnp.float32),
        meeting=plgpu.Barrier(num_arrivals=warpgroups),
    )


def result_type(layout: RowLayout, count: int) -> jax.ShapeDtypeStruct:
    """Returns the type of `count` sums, of each CTA and for folded columns."""
    shape = layout.ctas, count, layout.fold, layout.columns
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def zeros(layout: RowLayout) -> list[jax.Array]:
    """Returns the pieces of a sum before the first tile."""
    piece = jnp.zeros((WARPS, layout.width), jnp.float32)
    return [plgpu.layout_cast(piece, layout.registers)] * len(layout.pieces)


def sum_rows(piece: jax.Array) -> jax.Array:
    """Returns what a piece of a tile adds to a sum."""
    parts = [piece[i : i + WARPS] for i in range(0, piece.shape[0], WARPS)]
    return functools.reduce(jnp.add, parts)


def largest(value: jax.Array, pieces: Sequence[jax.Array]) -> jax.Array:
    """Returns the larger of `value` and all magnitudes of a tile, a row for each warp.

    Unlike sums, of all pieces together.
    """
    for piece in pieces:
        for i in range(0, piece.shape[0], WARPS):
            value = jnp.maximum(value, jnp.abs(piece[i : i + WARPS]))
    return value


def write(
    layout: RowLayout, sums: Sequence[Sequence[jax.Array]], target, area, meeting
):
    """Writes sums, added over the warps of the CTA.

    Args:
        layout: of the tiles.
        sums: of this warpgroup, each in pieces.
        target: a reference to what `result_type` describes.
        area: shared memory of `scratch`.
        meeting: barrier of `scratch`.
    """
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
    warpgroups = layout.settings.warpgroups
    registers = plgpu.Layout.WG_STRIDED((layout.columns,), vec_size=1)
    load = functools.partial(plgpu.load, layout=registers, optimized=False)

    def meet():
        plgpu.barrier_arrive(meeting)
        plgpu.barrier_wait(meeting)

    for i, pieces in enumerate(sums):
        if i > 0:
            meet()  # the area was read
        for piece, columns in zip(pieces, layout.pieces, strict=True):
            area[warpgroup, :, columns] = piece
        meet()

        @pl.when(warpgroup == i % warpgroups)  # another one works for each sum
        def _(i=i):
            # Folded rows have other columns in each warp, else all have the same.
            for first in range(layout.fold):
                warps = range(first, WARPS, layout.fold)
                at = itertools.product(range(warpgroups), warps)
                values = [load(area.at[w, r]) for w, r in at]
                target[cta, i, first] = functools.reduce(jnp.add, values)
