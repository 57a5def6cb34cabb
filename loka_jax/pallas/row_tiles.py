"""A warpgroup's part of the kernels that work by rows: its tiles, one after another.

`TilePipeline` loads tiles from global memory, by TMA into the warpgroup's ring buffer
in shared memory. In registers a tile is a list of subtiles, in the layout of `rows`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from loka_jax.fp8 import E4M3, fp8_max
from loka_jax.pallas import tiles
from loka_jax.pallas.rows import EXCHANGES, WARPS, RowLayout

# As in `fp8.compute_scale_inv`: the smallest scale that is normal and has a finite
# reciprocal.
_MIN_SCALE_INV = 2 * float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The position of a tile, and operations on its rows.

    Attributes:
        step: number of the tile among those of the warpgroup.
        exchange: shared memory for sums of folded rows, (3, 4) float32; else None.
    """

    layout: RowLayout
    step: Any
    matrix: Any
    row_values: Any
    exchange: Any

    def load_row_values(self, ref, *block: int) -> jax.Array:
        """Returns one value per row; a scalar for a folded row.

        Args:
            ref: the values of all rows, with a leading dim for each of `block`.
        """
        at = (*block, self.row_values)
        if self.layout.fold > 1:
            return ref[at]
        return _load(ref.at[at], self.layout.registers.reduce(1))

    def store(self, subtiles: Iterable[jax.Array], ref):
        """Writes the tile to a folded matrix, each subtile when it is computed."""
        for subtile, columns in zip(subtiles, self.layout.subtiles, strict=True):
            ref[self.matrix, columns] = subtile

    def per_row(self, values: jax.Array) -> jax.Array:
        """Returns a subtile whose row r holds `values[r]`; a scalar stays a scalar."""
        if values.ndim == 0:
            return values
        shape = self.layout.rows, self.layout.width
        return lax.broadcast_in_dim(values, shape, (0,))

    def per_column(self, values: jax.Array) -> jax.Array:
        """Returns a subtile whose column c holds `values[c]`; a folded row as it is."""
        if values.ndim == 2:
            return values
        shape = self.layout.rows, self.layout.width
        return lax.broadcast_in_dim(values, shape, (1,))

    def without_repeated(self, subtile: jax.Array) -> jax.Array:
        """Returns a subtile with zeros in the rows that another tile has, too."""
        if not self.layout.repeats_rows:
            return subtile
        first = self.layout.whole_tiles * self.layout.rows
        is_whole = self.matrix.start + self.layout.rows <= first
        row = self.matrix.start + plgpu.broadcasted_iota(
            jnp.int32, subtile.shape, 0, layout=self.layout.registers
        )
        return jnp.where(is_whole | (row >= first), subtile, 0.0)

    def sums(
        self, terms: Sequence[Sequence[jax.Array]], *, exchange: int = 0
    ) -> list[jax.Array]:
        """Returns the row sums of each of `terms`, lists of subtiles.

        Args:
            terms: at most two, and one if `exchange` is 1.
            exchange: 1 in the second of two calls for one tile.
        """
        totals = [functools.reduce(jnp.add, subtiles) for subtiles in terms]
        sums = [jnp.sum(total, axis=1) for total in totals]
        return self._across_warps(sums, jnp.add, exchange)

    def amax(self, subtiles: Sequence[jax.Array]) -> jax.Array:
        """Returns the largest magnitude of each row."""
        largest = functools.reduce(jnp.maximum, [jnp.abs(v) for v in subtiles])
        values = [jnp.max(largest, axis=1)]
        return self._across_warps(values, jnp.maximum, EXCHANGES - 1)[0]

    def _across_warps(self, values, combine, first: int):
        """Returns each of `values` combined over the warps of a folded row.

        Args:
            values: of each row of the folded tile; returned if rows are in one warp.
            first: index of the first value among the exchanges of a tile.
        """
        warps = range(self.layout.fold)
        if len(warps) == 1:
            return values
        for i, value in enumerate(values, first):
            self.exchange[i] = value
        plgpu.commit_smem()
        parts = [
            [self.exchange[i, warp] for warp in warps]
            for i, _ in enumerate(values, first)
        ]
        return [functools.reduce(combine, part) for part in parts]


def opaque(subtile: jax.Array) -> jax.Array:
    """Returns the subtile behind a barrier: later uses compute from it anew.

    One row per lane at a time: the barrier of jax 0.11.2 mixes up the registers of
    16-bit and 8-bit arrays with several rows per lane.
    """
    rows = range(0, subtile.shape[0], WARPS)
    return jnp.concatenate(
        [lax.optimization_barrier(subtile[i : i + WARPS]) for i in rows]
    )


def saturate(subtile: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns a subtile in FP8, values out of range at the largest finite one."""
    limit = fp8_max(dtype)
    return jnp.minimum(jnp.maximum(subtile, -limit), limit).astype(dtype)


def row_scale_inv(amax: jax.Array) -> jax.Array:
    """Returns the `scale_inv` of rows; positive for rows of zeros.

    A power of two, except for the scalar of a folded row: Mosaic cannot bitcast it.
    """
    if amax.ndim == 0:
        return jnp.maximum(amax * (1 / fp8_max(E4M3)), _MIN_SCALE_INV)
    return tiles.row_scale_inv(amax, _MIN_SCALE_INV)


def column_loader(
    layout: RowLayout, **vectors: tuple[Any, float]
) -> Callable[[str], list[Any]]:
    """Returns a function from a name to that vector's part for each subtile.

    Args:
        layout: of the tiles. Its config says whether vectors are loaded now or at each
            call.
        vectors: a reference, or None if absent, and a factor of the values.
    """
    is_folded = layout.fold > 1
    registers = layout.registers if is_folded else layout.registers.reduce(0)

    def load(name):
        ref, factor = vectors[name]
        if ref is None:
            return [None] * len(layout.subtiles)
        at = [(slice(None), c) if is_folded else c for c in layout.subtiles]
        values = [_load(ref.at[i], registers) for i in at]
        return values if factor == 1.0 else [v * factor for v in values]

    if not layout.config.keep_vectors:
        return load
    return {name: load(name) for name in vectors}.__getitem__


class TilePipeline:
    """Loads a warpgroup's tiles of some matrices of one shape, several ahead.

    Warpgroup i of a launch has the tiles i, i + warpgroups, and so on.
    """

    def __init__(
        self,
        layout: RowLayout,
        sources: Sequence,
        ring: Sequence = (),
        full: Any = None,
        exchange: Any = None,
    ):
        """Takes references to folded matrices, and to `layout.scratch`."""
        self._layout = layout
        self._sources = sources
        self._ring, self._full, self._exchange = ring, full, exchange
        self._warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
        self._first = self._warpgroup * layout.ctas + cta
        self._stride = layout.config.warpgroups * layout.ctas
        count = layout.whole_tiles
        # This warpgroup's entries of arrays with one value per warp of a launch.
        self.warp_values = pl.ds(self._first * WARPS, WARPS)
        self.steps = lax.div(count - self._first + self._stride - 1, self._stride)
        if layout.repeats_rows:
            # The warpgroup of the last whole tile has the repeated rows, too: others
            # would write them at the same time.
            has_last = self._first == (count - 1) % self._stride
            self.steps += has_last.astype(jnp.int32)

    def start(self):
        """Starts fetching the first tiles, as many as the ring buffer holds."""
        for step in range(self._layout.config.pipeline_stages):
            self._fetch(jnp.int32(step), step < self.steps)

    def tile(self, step) -> Tile:
        """Returns the tile of a step."""
        layout = self._layout
        tile = self._first + step * self._stride
        start = tile * layout.rows
        if layout.repeats_rows:
            start = jnp.minimum(start, layout.m - layout.rows)
        rows = pl.ds(start, layout.rows)
        if self._exchange is None:
            return Tile(layout, step, rows, rows, None)
        # Double-buffered: no warp overwrites values that another still reads.
        exchange = self._exchange.at[self._warpgroup, lax.rem(step, 2)]
        return Tile(layout, step, rows, tile, exchange)

    def load(self, tile: Tile) -> list[list[jax.Array]]:
        """Returns the tile of each matrix; starts to fetch the next into its stage."""
        subtiles, registers = self._layout.subtiles, self._layout.registers
        stages = self._layout.config.pipeline_stages
        if stages == 0:
            return [
                [_load(source.at[tile.matrix, c], registers) for c in subtiles]
                for source in self._sources
            ]
        stage = self._stage(tile.step)
        plgpu.barrier_wait(self._full.at[stage])
        loaded = [
            [_load(ring.at[stage, i], registers) for i in range(len(subtiles))]
            for ring in self._ring
        ]
        plgpu.commit_smem()  # all threads have read the stage
        following = tile.step + stages
        self._fetch(following, following < self.steps)
        return loaded

    def _stage(self, step):
        stages = self._layout.config.pipeline_stages
        return self._warpgroup * stages + lax.rem(step, stages)

    def _fetch(self, step, condition):
        @pl.when(condition)
        def _():
            stage, rows = self._stage(step), self.tile(step).matrix
            full = self._full.at[stage]
            for i, columns in enumerate(self._layout.subtiles):
                for source, ring in zip(self._sources, self._ring, strict=True):
                    subtile = source.at[rows, columns]
                    plgpu.copy_gmem_to_smem(subtile, ring.at[stage, i], full)


def _load(ref, layout) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
