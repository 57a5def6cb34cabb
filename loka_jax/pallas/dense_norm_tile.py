"""A team's row tile in `dense_norm`: shared memory, stores, and the other slabs."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.fp8 import E4M3
from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm_plan import Plan, Scratch
from loka_jax.pallas.tiles import PER_COLUMN, PER_ROW, ROWS, per_row

_WGMMA = plgpu.Layout.WGMMA


class At(NamedTuple):
    """Where this thread is.

    Attributes:
        group: the first row tile of this CTA; the others follow `groups` apart.
        slab: its slab.
        steps: its number of row tiles.
    """

    group: Any
    slab: Any
    steps: Any

    def turns(self, team, teams: int):
        """Returns the number of row tiles of a team."""
        return lax.div(self.steps - team + teams - 1, teams)


class Tile:
    """A team's row tile: what it shares with shared memory and with other slabs."""

    def __init__(self, plan: Plan, team, turn, scratch: Scratch, at: At):
        """Takes the launch's plan, the tile's team and turn, and the CTA's memory."""
        self._plan, self._team, self._turn = plan, team, turn
        self._scratch, self.at = scratch, at
        staged = {jnp.bfloat16: scratch.wide, E4M3: scratch.narrow}
        self._stores = {
            jnp.dtype(dtype): tiles.RowStore(staging.at[team])
            for dtype, staging in staged.items()
            if staging is not None
        }

    def column(self, name: str):
        """Returns this slab's part of what is given for each column."""
        source = table_row(self._plan, self._scratch, name)
        return plgpu.load(source, layout=PER_COLUMN)

    def affine(self, start: int, size: int):
        """Returns gamma and beta of some columns, as `_prepare` left them."""
        rows = affine_rows(self._plan, self._scratch)
        columns = pl.ds(start, size)
        return tuple(plgpu.load(row.at[columns], layout=PER_COLUMN) for row in rows)

    def x_scale(self):
        """Returns the scales of the tile's rows of x."""
        half = lax.rem(self._turn, 2)
        slot = 2 * self._team + half
        plgpu.barrier_wait(self._scratch.scale_full.at[slot])
        scale = plgpu.load(self._scratch.x_scale.at[self._team, half], layout=PER_ROW)
        turns = self.at.turns(self._team, self._plan.settings.teams)
        arrive_if(self._turn + 2 < turns, self._scratch.scale_empty.at[slot])
        return scale

    def store(self, tile, target, rows, start=0):
        """Starts storing columns of the tile in the target's dtype."""
        column = self.at.slab * self._plan.columns + start
        self._stores[jnp.dtype(target.dtype)](
            tile.astype(target.dtype), target, rows, column
        )

    def store_rows(self, place, values, target, rows, *, by_slab=False):
        """Starts storing a value a row; slab 0 does it if all have the same."""
        staging = self._scratch.rows.at[self._team, place]
        staging[...] = values
        plgpu.commit_smem()

        def copy():
            plgpu.copy_smem_to_gmem(staging, target.at[rows])

        if by_slab or self._plan.settings.slabs == 1:
            return copy()
        pl.when(self.at.slab == 0)(copy)

    def exchange(self, index, values, combine):
        """Returns one or two values a row, combined over the slabs.

        `index` counts a tile's exchanges. Two buffers are enough: who is one exchange
        ahead has everybody's part of the last one, so the one before was read.
        """
        s = self._plan.settings
        half = lax.rem(self._turn * self._plan.exchanges + index, 2)
        barrier = self._scratch.sums_full.at[2 * self._team + half]
        buffer = self._scratch.sums.at[self._team, half]
        # The unit that travels is a tile of 8 columns: four for either value.
        iota = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 1, layout=_WGMMA)
        is_first = iota < 4
        total = jnp.where(is_first, per_row(values[0], 8), per_row(values[-1], 8))
        own = total
        for distance in range(1, s.slabs):
            plgpu.async_store_smem(
                own,
                buffer.at[distance - 1],
                barrier,
                cluster_idx=lax.rem(self.at.slab + distance, s.slabs),
                cluster_dim="slab",
            )
        plgpu.barrier_wait(barrier)
        for distance in range(1, s.slabs):
            other = plgpu.load(buffer.at[distance - 1], layout=_WGMMA)
            total = combine(total, other)
        # Every column of a half holds the same value: a maximum picks it exactly.
        low = jnp.full((ROWS, 8), -jnp.inf, jnp.float32)
        low = plgpu.layout_cast(low, _WGMMA)
        first = jnp.max(jnp.where(is_first, total, low), axis=1)
        second = jnp.max(jnp.where(is_first, low, total), axis=1)
        return (first, second)[: len(values)]


def affine_rows(plan: Plan, scratch: Scratch):
    """Returns where gamma and beta lie as the row tiles read them."""
    if scratch.affine is not None:
        return scratch.affine.at[0], scratch.affine.at[1]
    return tuple(table_row(plan, scratch, name) for name in ("gamma", "beta"))


def table_row(plan: Plan, scratch: Scratch, name: str):
    """Returns where lies what is given for each column."""
    return scratch.table.at[plan.table.index(name)]


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
