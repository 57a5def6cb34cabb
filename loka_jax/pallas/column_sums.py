"""Sums over all rows of a launch, of values for every column of tiles of rows.

A lane has the same columns in every tile. So its sums stay in registers, a row for each
warp, until the last tile; then they are added over the warps of a CTA, in a fixed order
and without atomics. The caller adds the sums of the CTAs.

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
    """Returns the memory that `write` takes."""
    warpgroups = layout.config.warpgroups
    return dict(
        area=plgpu.SMEM((warpgroups, WARPS, layout.columns), jnp.float32),
        barrier=plgpu.Barrier(num_arrivals=warpgroups),
    )


def result_type(layout: RowLayout, count: int) -> jax.ShapeDtypeStruct:
    """Returns the type of `count` sums, of each CTA and for folded columns."""
    shape = layout.ctas, count, layout.fold, layout.columns
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def zeros(layout: RowLayout) -> list[jax.Array]:
    """Returns the subtiles of a sum before the first tile."""
    subtile = jnp.zeros((WARPS, layout.width), jnp.float32)
    return [plgpu.layout_cast(subtile, layout.registers)] * len(layout.subtiles)


def sum_rows(subtile: jax.Array) -> jax.Array:
    """Returns the summand of a tile's subtile to a sum."""
    parts = [subtile[i : i + WARPS] for i in range(0, subtile.shape[0], WARPS)]
    return functools.reduce(jnp.add, parts)


def largest(value: jax.Array, subtiles: Sequence[jax.Array]) -> jax.Array:
    """Returns the larger of `value` and all magnitudes of a tile, a row for each warp.

    Unlike sums, over all subtiles together.
    """
    for subtile in subtiles:
        for i in range(0, subtile.shape[0], WARPS):
            value = jnp.maximum(value, jnp.abs(subtile[i : i + WARPS]))
    return value


def write(
    layout: RowLayout, sums: Sequence[Sequence[jax.Array]], target, area, barrier
):
    """Writes sums, added over the warps of the CTA."""
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
    warpgroups = layout.config.warpgroups
    registers = plgpu.Layout.WG_STRIDED((layout.columns,), vec_size=1)
    load = functools.partial(plgpu.load, layout=registers, optimized=False)

    def synchronize():
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)

    for i, subtiles in enumerate(sums):
        if i > 0:
            synchronize()  # the area has been read
        for subtile, columns in zip(subtiles, layout.subtiles, strict=True):
            area[warpgroup, :, columns] = subtile
        synchronize()

        @pl.when(warpgroup == i % warpgroups)  # a different one for each sum
        def _(i=i):
            # Folded rows have other columns in each warp, else all have the same.
            for first in range(layout.fold):
                warps = range(first, WARPS, layout.fold)
                at = itertools.product(range(warpgroups), warps)
                values = [load(area.at[w, r]) for w, r in at]
                target[cta, i, first] = functools.reduce(jnp.add, values)
