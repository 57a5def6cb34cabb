"""A launch of `dense_norm`, and what each warpgroup of it does.

A producer warpgroup feeds x by TMA to teams of one warpgroup each. A team's products
start when those of the team before it are done, so that the tensor cores work for one
team while the others normalize.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import XHAT_SCALE_INV, Normed
from loka_jax.pallas import tiles
from loka_jax.pallas.activations import activate_scaled, input_scale
from loka_jax.pallas.dense_norm_plan import Inputs, Plan, Results, Scratch, present
from loka_jax.pallas.dense_norm_tile import (
    At,
    Tile,
    affine_rows,
    arrive_if,
    table_row,
    wait_if,
)
from loka_jax.pallas.tiles import PER_COLUMN, ROWS, per_column, per_row

# Below it the reciprocal of a row scale would leave float16's range.
_MIN_ROW_SCALE = 2.0**-14


class Kernel:
    """A launch and the kernel's body."""

    def __init__(self, plan: Plan, epsilon: float):
        """Takes the launch's plan, and what is added to the variance."""
        self.plan, self.epsilon = plan, epsilon

    def launch(self, inputs: Inputs, interpret) -> Normed:
        """Runs the kernel."""
        results, scratch = self.plan.results(), self.plan.scratch()
        slabs = self.plan.settings.slabs
        mesh: dict[str, Any]
        if self.plan.exchanges:
            mesh = dict(grid=(self.plan.groups,), grid_names=("group",))
            mesh |= dict(cluster=(slabs,), cluster_names=("slab",))
        else:
            mesh = dict(grid=(self.plan.groups, slabs), grid_names=("group", "slab"))

        def body(*refs):
            refs = iter(refs)
            self._body(*(_fill(like, refs) for like in (inputs, results, scratch)))

        written = plgpu.kernel(
            body,
            out_type=present(results),
            scratch_types=present(scratch),
            **mesh,
            num_threads=self.plan.settings.teams + 1,
            thread_name="warpgroup",
            compiler_params=tiles.compiler_params(),
            interpret=interpret,
        )(*present(inputs))
        out = _fill(results, iter(written))
        y_fp8 = None
        if out.y_fp8 is not None:
            row_scale, given = out.y_scale, inputs.y_scale
            scale = given.reshape(()) if row_scale is None else row_scale[:, None]
            y_fp8 = Fp8Array(out.y_fp8, scale)
        return Normed(out.y, y_fp8, out.xhat, out.rstd, out.y_amax)

    def _body(self, inputs: Inputs, results: Results, scratch: Scratch):
        teams = self.plan.settings.teams
        warpgroup, group = lax.axis_index("warpgroup"), lax.axis_index("group")
        slab = lax.axis_index("slab") if self.plan.settings.slabs > 1 else 0
        steps = lax.div(
            self.plan.steps - group + self.plan.groups - 1, self.plan.groups
        )
        at = At(group, slab, steps)

        @pl.when(warpgroup == teams)
        def _():
            plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")
            self._produce(inputs, scratch, at)

        @pl.when(warpgroup < teams)
        def _():
            registers = tiles.compute_registers(teams)
            plgpu.set_max_registers(registers, action="increase")
            self._work(warpgroup, inputs, results, scratch, at)

    def _row_slice(self, at: At, step):
        return pl.ds((at.group + step * self.plan.groups) * ROWS, ROWS)

    def _slot(self, team, part):
        """Returns where the `part`-th part of x that a team reads lies in the rings."""
        return team * self.plan.settings.stages + lax.rem(
            part, self.plan.settings.stages
        )

    def _produce(self, inputs: Inputs, scratch: Scratch, at: At):
        """Loads what stays, then keeps the rings of x filled."""
        s = self.plan.settings
        columns = pl.ds(at.slab * self.plan.columns, self.plan.columns)
        # First what is prepared while the weight is on its way.
        for i, name in enumerate(self.plan.table):
            source = getattr(inputs, name).at[columns]
            plgpu.copy_gmem_to_smem(source, scratch.table.at[i], scratch.given)
        for p in range(self.plan.parts):
            source = inputs.w.at[columns, pl.ds(p * self.plan.part, self.plan.part)]
            plgpu.copy_gmem_to_smem(source, scratch.w.at[p], scratch.resident)

        @pl.loop(0, at.steps)
        def _(step):
            team, turn = lax.rem(step, s.teams), lax.div(step, s.teams)
            rows = self._row_slice(at, step)
            if self.plan.x_scale_by_row:
                half = lax.rem(turn, 2)
                slot = 2 * team + half
                wait_if(turn >= 2, scratch.scale_empty.at[slot])
                target, barrier = scratch.x_scale.at[team, half], scratch.scale_full
                source = inputs.x_scale.at[rows]
                plgpu.copy_gmem_to_smem(source, target, barrier.at[slot])
            for p in range(self.plan.parts):
                part = turn * self.plan.parts + p
                slot = self._slot(team, part)
                wait_if(part >= s.stages, scratch.empty.at[slot])
                source = inputs.x.at[rows, pl.ds(p * self.plan.part, self.plan.part)]
                target, barrier = scratch.x.at[slot], scratch.full.at[slot]
                plgpu.copy_gmem_to_smem(source, target, barrier)

    def _work(self, team, inputs, results, scratch, at: At):
        """Works through the row tiles of a team."""
        teams = self.plan.settings.teams
        scale = _product_of_scalars(inputs.x_scale, inputs.w_scale)
        to_fp8 = None if inputs.y_scale is None else 1.0 / inputs.y_scale[0]
        if self.plan.table:
            plgpu.barrier_wait(scratch.given)
        if self.plan.has_affine:
            pl.when(team == 0)(lambda: self._prepare(scratch))
            plgpu.barrier_wait(scratch.prepared)
        plgpu.barrier_wait(scratch.resident)

        @pl.loop(0, at.turns(team, teams))
        def _(turn):
            step = turn * teams + team
            z = self._multiply(team, turn, scratch, at)
            tile = Tile(self.plan, team, turn, scratch, at)
            row_scale = scale
            if self.plan.x_scale_by_row:
                row_scale = tile.x_scale()
                row_scale = row_scale if scale is None else row_scale * scale
            # What the last tile of this team wrote must have left before.
            tiles.drain()
            rows = self._row_slice(at, step)
            self._finish(z, row_scale, to_fp8, tile, results, rows)

        tiles.drain()

    def _prepare(self, scratch: Scratch):
        """Rewrites gamma and beta once, so that row tiles need not scale them."""
        factor = input_scale(self.plan.activation)
        given = [
            plgpu.load(table_row(self.plan, scratch, name), layout=PER_COLUMN)
            for name in ("gamma", "beta")
        ]
        # Every warp reads all columns, and may be about to overwrite them for others.
        plgpu.commit_smem()
        for value, target in zip(given, affine_rows(self.plan, scratch), strict=True):
            target[...] = (value * factor).astype(self.plan.late_dtype)
        plgpu.barrier_arrive(scratch.prepared)

    def _multiply(self, team, turn, scratch: Scratch, at: At):
        """Returns `x W^T` of a row tile: (64, columns) in float32, not yet scaled."""
        teams = self.plan.settings.teams
        step = turn * teams + team

        def product(accumulator):
            for p in range(self.plan.parts):
                slot = self._slot(team, turn * self.plan.parts + p)
                plgpu.barrier_wait(scratch.full.at[slot])
                if p == 0 and teams > 1:
                    wait_if(step > 0, scratch.turn.at[team])
                weight = scratch.w.at[p].transpose((1, 0))
                plgpu.wgmma(accumulator, scratch.x.at[slot], weight)
                if p > 0:
                    plgpu.wgmma_wait(1)
                    self._release(team, turn, p - 1, scratch, at)
            return accumulator[...]

        z = pl.run_scoped(product, tiles.accumulator(ROWS, self.plan.columns))
        if teams > 1:
            following = scratch.turn.at[lax.rem(team + 1, teams)]
            arrive_if(step + 1 < at.steps, following)
        self._release(team, turn, self.plan.parts - 1, scratch, at)
        return z

    def _release(self, team, turn, p, scratch: Scratch, at: At):
        """Gives a part of x that was read back to the producer, if it needs it."""
        part = turn * self.plan.parts + p
        needed = (
            part + self.plan.settings.stages
            < at.turns(team, self.plan.settings.teams) * self.plan.parts
        )
        arrive_if(needed, scratch.empty.at[self._slot(team, part)])

    def _finish(self, z, scale, to_fp8, tile: Tile, results: Results, rows):
        """Normalizes, activates and stores a row tile."""
        want = self.plan.want
        if self.plan.w_scale_by_column:
            z = z * per_column(tile.column("w_scale"))
        if "bias" in self.plan.table:
            z = z if scale is None else z * self._by_row(scale)
            z, scale = z + per_column(tile.column("bias")), None
        z, rstd, factor = self._normalize(z, scale, tile)
        if want.rstd:
            by_block = self.plan.norm == "block" and self.plan.settings.slabs > 1
            target = results.rstd.at[tile.at.slab] if by_block else results.rstd
            tile.store_rows(0, rstd, target, rows, by_slab=by_block)
        z = z.astype(self.plan.late_dtype)
        store = tile.store
        # Piece by piece fewer values are alive at a time; a row scale needs all.
        size = self.plan.settings.piece_bytes // (1 if self.plan.writes_narrow else 2)
        size = self.plan.columns if want.y_fp8 == "rowwise" else size
        amax = None
        for start in range(0, self.plan.columns, size):
            part = z[:, start : start + size]
            if want.xhat is not None:
                xhat = part * (1 / XHAT_SCALE_INV) if want.xhat == E4M3 else part
                store(xhat, results.xhat, rows, start)
            y = self._activate(part, factor, tile, start)
            if want.y:
                store(y, results.y, rows, start)
            if want.y_fp8 == "rowwise" or want.y_amax:
                largest = jnp.max(jnp.abs(y), axis=1).astype(jnp.float32)
                amax = largest if amax is None else jnp.maximum(amax, largest)
            if want.y_fp8 == "rowwise":
                to_fp8 = per_row(self._row_scale(amax, tile, results, rows), size)
            if want.y_fp8:
                store(y * to_fp8.astype(y.dtype), results.y_fp8, rows, start)
        if want.y_amax:
            target = results.y_amax.at[tile.at.slab]
            tile.store_rows(1, amax, target, rows, by_slab=True)

    def _row_scale(self, amax, tile: Tile, results: Results, rows):
        """Stores the scales of the rows and returns their reciprocals."""
        if self.plan.exchanges:
            (amax,) = tile.exchange(self.plan.exchanges - 1, (amax,), jnp.maximum)
        scale_inv = tiles.row_scale_inv(amax, _MIN_ROW_SCALE)
        tile.store_rows(2, scale_inv, results.y_scale, rows)
        return 1.0 / scale_inv

    def _activate(self, v, factor, tile: Tile, start: int):
        """Returns columns of the activations, from what the norm returned."""
        if self.plan.has_affine:
            gamma, beta = tile.affine(start, v.shape[1])
            v = v * per_column(gamma) + per_column(beta)
        elif factor != 1.0:
            v = v * factor
        return activate_scaled(self.plan.activation, v)

    def _normalize(self, z, scale, tile: Tile):
        """Returns the normalized tile, 1 / deviation, and a factor still to apply.

        A scale of z is not applied to z: norms do not see it, but through epsilon.
        The factor is the activation's input scale, applied here if that is free.
        """
        factor = input_scale(self.plan.activation)
        is_last = not self.plan.has_affine and self.plan.want.xhat is None
        here, later = (factor, 1.0) if is_last else (1.0, factor)
        if self.plan.norm == "none":
            if scale is not None:
                z = z * self._by_row(scale * here)
            elif here != 1.0:
                z = z * here
            return z, None, later
        sums = [jnp.sum(z * z, axis=1)]
        if self.plan.norm == "layer":
            sums.append(jnp.sum(z, axis=1))
        features = self.plan.columns if self.plan.norm == "block" else self.plan.n
        if self.plan.exchanges and self.plan.norm != "block":
            sums = tile.exchange(0, sums, jnp.add)
        moment, *mean = (total * (1 / features) for total in sums)
        if mean:
            moment = jnp.maximum(moment - mean[0] * mean[0], 0.0)
        if scale is None:
            rstd = rate = lax.rsqrt(moment + self.epsilon)
        else:
            rstd = lax.rsqrt(scale * scale * moment + self.epsilon)
            rate = scale * rstd
        rate = rate if here == 1.0 else rate * here
        z = z * per_row(rate, self.plan.columns)
        if mean:
            z = z - per_row(mean[0] * rate, self.plan.columns)
        return z, rstd, later

    def _by_row(self, value):
        """Returns what multiplies a tile: a scalar as it is, rows broadcast."""
        return per_row(value, self.plan.columns) if value.ndim else value


def _fill(like, values):
    """Returns `like` with its values that are not None replaced by the next ones."""
    return type(like)(*(None if v is None else next(values) for v in like))


def _product_of_scalars(*scales):
    """Returns the product of those that are one number, None if there are none."""
    numbers = [s[0] for s in scales if s is not None and s.shape[0] == 1]
    return math.prod(numbers[1:], start=numbers[0]) if numbers else None
