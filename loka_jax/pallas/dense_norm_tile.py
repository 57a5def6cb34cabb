"""A consumer's row tile in `dense_norm`: shared memory, stores, other N tiles."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.fp8 import E4M3
from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm_layout import LaunchLayout, Scratch
from loka_jax.pallas.tiles import PER_COLUMN, PER_ROW, ROWS, per_row

_WGMMA = plgpu.Layout.WGMMA


class Position(NamedTuple):
    """The position of this CTA in the grid.

    Attributes:
        m_cta: its first row tile; the others follow `LaunchLayout.m_ctas` apart.
    """

    m_cta: Any
    n_tile: Any
    m_tiles: Any

    def iterations(self, consumer, consumers: int):
        """Returns the number of row tiles of a consumer."""
        return lax.div(self.m_tiles - consumer + consumers - 1, consumers)


class Tile:
    """A consumer's row tile: its loads, stores and exchanges with other N tiles."""

    def __init__(
        self,
        layout: LaunchLayout,
        consumer,
        iteration,
        scratch: Scratch,
        position: Position,
    ):
        """Takes the launch layout, and the consumer with its iteration."""
        self._layout, self._scratch = layout, scratch
        self._consumer, self._iteration = consumer, iteration
        self.n_tile = position.n_tile
        self._iterations = position.iterations(
            consumer, layout.config.consumer_warpgroups
        )
        staging = {jnp.bfloat16: scratch.store_bf16, E4M3: scratch.store_fp8}
        self._stores = {
            jnp.dtype(dtype): tiles.RowStore(buffer.at[consumer])
            for dtype, buffer in staging.items()
            if buffer is not None
        }

    def column_values(self, name: str):
        """Returns this N tile's part of a vector."""
        source = vector_ref(self._layout, self._scratch, name)
        return plgpu.load(source, layout=PER_COLUMN)

    def affine(self, start: int, size: int):
        """Returns gamma and beta of some columns, as the consumers prepared them."""
        columns = pl.ds(start, size)
        refs = affine_refs(self._layout, self._scratch)
        return tuple(plgpu.load(ref.at[columns], layout=PER_COLUMN) for ref in refs)

    def x_scale(self):
        """Returns the scales of the tile's rows of x."""
        half = lax.rem(self._iteration, 2)
        stage = 2 * self._consumer + half
        plgpu.barrier_wait(self._scratch.x_scale_full.at[stage])
        source = self._scratch.x_scale.at[self._consumer, half]
        scale = plgpu.load(source, layout=PER_ROW)
        is_needed = self._iteration + 2 < self._iterations
        arrive_if(is_needed, self._scratch.x_scale_empty.at[stage])
        return scale

    def store(self, tile, target, rows, start=0):
        """Starts storing columns of the tile in the target's dtype."""
        column = self.n_tile * self._layout.tile_n + start
        store = self._stores[jnp.dtype(target.dtype)]
        store(tile.astype(target.dtype), target, rows, column)

    def store_row_values(self, index, values, target, rows, *, by_n_tile=False):
        """Starts storing a value per row.

        Args:
            index: of the staging buffer, a different one for each output.
            by_n_tile: store them from every N tile; else from the first one only, as
                all have the same values.
        """
        staging = self._scratch.store_rows.at[self._consumer, index]
        staging[...] = values
        plgpu.commit_smem()

        def copy():
            plgpu.copy_smem_to_gmem(staging, target.at[rows])

        if by_n_tile or self._layout.config.n_tiles == 1:
            return copy()
        pl.when(self.n_tile == 0)(copy)

    def exchange(self, index, values, combine):
        """Returns one or two values per row, combined over the N tiles.

        `index` counts a tile's exchanges. Two buffers are enough: a CTA that is one
        exchange ahead has received every part of the previous one, so the buffer of the
        one before that has been read.
        """
        n_tiles = self._layout.config.n_tiles
        half = lax.rem(self._iteration * self._layout.exchanges + index, 2)
        barrier = self._scratch.partials_full.at[2 * self._consumer + half]
        buffer = self._scratch.partials.at[self._consumer, half]
        # The smallest unit of a copy is a tile of 8 columns: four for either value.
        iota = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 1, layout=_WGMMA)
        is_first = iota < 4
        total = jnp.where(is_first, per_row(values[0], 8), per_row(values[-1], 8))
        partial = total
        for distance in range(1, n_tiles):
            plgpu.async_store_smem(
                partial,
                buffer.at[distance - 1],
                barrier,
                cluster_idx=lax.rem(self.n_tile + distance, n_tiles),
                cluster_dim="n_tile",
            )
        plgpu.barrier_wait(barrier)
        for distance in range(1, n_tiles):
            other = plgpu.load(buffer.at[distance - 1], layout=_WGMMA)
            total = combine(total, other)
        # All columns of a half hold the same value: a maximum extracts it exactly.
        low = jnp.full((ROWS, 8), -jnp.inf, jnp.float32)
        low = plgpu.layout_cast(low, _WGMMA)
        first = jnp.max(jnp.where(is_first, total, low), axis=1)
        second = jnp.max(jnp.where(is_first, low, total), axis=1)
        return (first, second)[: len(values)]


def affine_refs(layout: LaunchLayout, scratch: Scratch):
    """Returns references to gamma and beta as the row tiles read them."""
    if scratch.affine is not None:
        return scratch.affine.at[0], scratch.affine.at[1]
    return tuple(vector_ref(layout, scratch, name) for name in ("gamma", "beta"))


def vector_ref(layout: LaunchLayout, scratch: Scratch, name: str):
    """Returns a reference to an N tile's part of a vector."""
    return scratch.vectors.at[layout.vectors.index(name)]


def wait_if(condition, barrier):
    """Waits for a barrier under a condition."""

    @pl.when(condition)
    def _():
        plgpu.barrier_wait(barrier)


def arrive_if(condition, barrier):
    """Arrives at a barrier under a condition."""

    @pl.when(condition)
    def _():
        plgpu.barrier_arrive(barrier)
