"""A warpgroup's side of the kernels that work by rows: its tiles, one after another.

`Walk` brings tiles from global memory, by TMA to a ring in shared memory that is the
warpgroup's own. In registers a tile is a list of pieces, in the layout of `rows`.
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

# As in `fp8.compute_scale_inv`: the least scale whose reciprocal is finite, and that is
# no denormal itself.
_MIN_SCALE_INV = 2 * float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Where a tile lies, and what is done with its rows.

    Attributes:
        layout: of all tiles.
        step: which of the warpgroup's tiles it is.
        matrix: its rows of the folded matrices.
        vector: its entries of what has one value a row.
        exchange: shared memory for sums of folded rows, (3, 4) float32; else None.
    """

    layout: RowLayout
    step: Any
    matrix: Any
    vector: Any
    exchange: Any

    def load_row_values(self, ref, *block: int) -> jax.Array:
        """Returns one value a row; one number for a folded row.

        Args:
            ref: the values of all rows, after an index for each of `block`.
            block: what the index of a value starts with.
        """
        at = (*block, self.vector)
        if self.layout.fold > 1:
            return ref[at]
        return _load(ref.at[at], self.layout.registers.reduce(1))

    def store(self, pieces: Iterable[jax.Array], ref):
        """Writes the tile to a folded matrix, each piece when it is made."""
        for piece, columns in zip(pieces, self.layout.pieces, strict=True):
            ref[self.matrix, columns] = piece

    def per_row(self, values: jax.Array) -> jax.Array:
        """Returns a piece whose row r holds `values[r]`; one number stays one."""
        if values.ndim == 0:
            return values
        shape = self.layout.rows, self.layout.width
        return lax.broadcast_in_dim(values, shape, (0,))

    def per_column(self, values: jax.Array) -> jax.Array:
        """Returns a piece whose column c holds `values[c]`; a folded row stays one."""
        if values.ndim == 2:
            return values
        shape = self.layout.rows, self.layout.width
        return lax.broadcast_in_dim(values, shape, (1,))

    def sums(
        self, terms: Sequence[Sequence[jax.Array]], *, exchange: int = 0
    ) -> list[jax.Array]:
        """Returns the sums of the rows of each of `terms`, given in pieces.

        Args:
            terms: at most two, and one if `exchange` is 1.
            exchange: 1 in the second of two calls for one tile.
        """
        totals = [functools.reduce(jnp.add, pieces) for pieces in terms]
        sums = [jnp.sum(total, axis=1) for total in totals]
        return self._across_warps(sums, jnp.add, exchange)

    def amax(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """Returns the largest magnitude of each row."""
        largest = functools.reduce(jnp.maximum, [jnp.abs(v) for v in pieces])
        values = [jnp.max(largest, axis=1)]
        return self._across_warps(values, jnp.maximum, EXCHANGES - 1)[0]

    def _across_warps(self, values, combine, first: int):
        """Returns the one number of a folded row, for each of `values`.

        Args:
            values: of each row of the folded tile; returned if rows are in one warp.
            combine: of two values.
            first: which of the exchanges of a tile the first of them is.
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


def opaque(piece: jax.Array) -> jax.Array:
    """Returns a piece that the compiler does not know to be the same.

    What is computed of it is computed again. One row a lane at a time: the barrier of
    jax 0.11.2 mixes up the registers of narrower arrays that have several a lane.
    """
    rows = range(0, piece.shape[0], WARPS)
    return jnp.concatenate(
        [lax.optimization_barrier(piece[i : i + WARPS]) for i in rows]
    )


def saturate(piece: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns a piece in FP8, what is out of range at the largest finite value."""
    limit = fp8_max(dtype)
    return jnp.minimum(jnp.maximum(piece, -limit), limit).astype(dtype)


def row_scale_inv(amax: jax.Array) -> jax.Array:
    """Returns the `scale_inv` of rows; positive for zeros.

    A power of two, but for the number of a folded row: Mosaic has no bits of scalars.
    """
    if amax.ndim == 0:
        return jnp.maximum(amax * (1 / fp8_max(E4M3)), _MIN_SCALE_INV)
    return tiles.row_scale_inv(amax, _MIN_SCALE_INV)


def column_loader(
    layout: RowLayout, **parameters: tuple[Any, float]
) -> Callable[[str], list[Any]]:
    """Returns a function from a name to that parameter of each piece.

    Args:
        layout: of the tiles. Its settings say if parameters are loaded now or at each
            call.
        parameters: one value a column, or None, which is given for each piece then, and
            what to multiply it by.
    """
    is_folded = layout.fold > 1
    registers = layout.registers if is_folded else layout.registers.reduce(0)

    def load(name):
        ref, factor = parameters[name]
        if ref is None:
            return [None] * len(layout.pieces)
        at = [(slice(None), c) if is_folded else c for c in layout.pieces]
        values = [_load(ref.at[i], registers) for i in at]
        return values if factor == 1.0 else [v * factor for v in values]

    if not layout.settings.resident:
        return load
    return {name: load(name) for name in parameters}.__getitem__


class Walk:
    """A warpgroup's walk over its tiles of some matrices of one shape.

    Of all warpgroups of a launch, numbered from 0, number i has the tiles i,
    i + warpgroups, and so on.
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
        self._stride = layout.settings.warpgroups * layout.ctas
        count = layout.m // layout.tile_rows
        # This warpgroup's place among values of which each warp of a launch writes one.
        self.parts = pl.ds(self._first * WARPS, WARPS)
        self.steps = lax.div(count - self._first + self._stride - 1, self._stride)

    def start(self):
        """Starts fetching the first tiles, as many as the ring holds."""
        for step in range(self._layout.settings.stages):
            self._fetch(jnp.int32(step), step < self.steps)

    def tile(self, step) -> Tile:
        """Returns where the tile of a step lies."""
        layout = self._layout
        tile = self._first + step * self._stride
        rows = pl.ds(tile * layout.rows, layout.rows)
        if self._exchange is None:
            return Tile(layout, step, rows, rows, None)
        # In turns, so that no warp writes what another still reads.
        exchange = self._exchange.at[self._warpgroup, lax.rem(step, 2)]
        return Tile(layout, step, rows, tile, exchange)

    def load(self, tile: Tile) -> list[list[jax.Array]]:
        """Returns the tile of each matrix, and starts to fetch the next in its slot."""
        pieces, registers = self._layout.pieces, self._layout.registers
        stages = self._layout.settings.stages
        if stages == 0:
            return [
                [_load(source.at[tile.matrix, c], registers) for c in pieces]
                for source in self._sources
            ]
        slot = self._slot(tile.step)
        plgpu.barrier_wait(self._full.at[slot])
        loaded = [
            [_load(ring.at[slot, i], registers) for i in range(len(pieces))]
            for ring in self._ring
        ]
        plgpu.commit_smem()  # all threads have read the slot
        following = tile.step + stages
        self._fetch(following, following < self.steps)
        return loaded

    def _slot(self, step):
        stages = self._layout.settings.stages
        return self._warpgroup * stages + lax.rem(step, stages)

    def _fetch(self, step, condition):
        @pl.when(condition)
        def _():
            slot, rows = self._slot(step), self.tile(step).matrix
            for i, columns in enumerate(self._layout.pieces):
                for source, ring in zip(self._sources, self._ring, strict=True):
                    piece = source.at[rows, columns]
                    slot_piece = ring.at[slot, i]
                    plgpu.copy_gmem_to_smem(piece, slot_piece, self._full.at[slot])


def _load(ref, layout) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False)
