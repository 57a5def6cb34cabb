"""What a team of `dense_norm_backward` does with one tile of 64 rows."""

import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax.fp8 import E4M3, fp8_max
from loka_jax.pallas import tiles
from loka_jax.pallas.activations import activation_slope
from loka_jax.pallas.dense_norm_backward_plan import Inputs, Plan, Results, Scratch
from loka_jax.pallas.tiles import ROWS, per_column, per_row

_LEAST_AMAX = 1e-30  # keeps a row's scale, and its inverse, normal numbers


class Cta(NamedTuple):
    """What the warpgroups of a CTA have in common.

    Attributes:
        plan: of the launch.
        inputs, results, scratch: references to global and shared memory.
    """

    plan: Plan
    inputs: Inputs
    results: Results
    scratch: Scratch

    @property
    def worker(self):
        """Returns the first row tile of this CTA; the others follow `workers` apart."""
        return lax.axis_index("worker")

    @property
    def slab(self):
        """Returns the index of its rows of W."""
        return lax.axis_index("slab")

    @property
    def steps(self):
        """Returns its number of row tiles, computed anew: cheaper than a register."""
        p = self.plan
        return lax.div(p.steps - self.worker + p.workers - 1, p.workers)

    def rows(self, step):
        """Returns the rows of a tile of this CTA."""
        return pl.ds((self.worker + step * self.plan.workers) * ROWS, ROWS)

    def slot(self, step):
        """Returns where the tile lies in shared memory."""
        return lax.rem(step, self.plan.settings.slots)

    def full(self, team, slot):
        """Returns the barrier that a team waits on for what was loaded to a slot."""
        return self.scratch.full.at[team * self.plan.settings.slots + slot]


class Tile:
    """One team's work on one tile of rows."""

    def __init__(self, cta: Cta, team, step, column_sums):
        """Names what is worked on; `column_sums` is None without gamma and beta."""
        self.cta, self.plan, self.scratch = cta, cta.plan, cta.scratch
        self.team, self.step = team, step
        self.slot, self.rows = cta.slot(step), cta.rows(step)
        self.column_sums = column_sums
        self.width = min(self.plan.settings.columns, self.plan.side)
        self.pieces = range(0, self.plan.n, self.width)
        self.dy = _SharedTile(self.scratch.dy, self.slot, self.width)
        self.xhat = _SharedTile(self.scratch.xhat, self.slot, self.width)
        # What is multiplied by W.
        self.dz = self.dy
        if self.plan.quantizes_in_place:
            self.dz = self.xhat
        elif self.plan.multiplies_fp8:
            self.dz = _SharedTile(self.scratch.dz, team, self.width)

    def run(self):
        """Turns rows of dy and xhat into rows of dz and dx."""
        p = self.plan
        rstd = None
        if p.norm != "none":
            source = self.cta.inputs.rstd.at[self.rows]
            rstd = plgpu.load(source, layout=tiles.PER_ROW, optimized=False)
        plgpu.barrier_wait(self.cta.full(self.team, self.slot))
        du, g_sum, gx_sum = self._activation_backward()
        dz = self._norm_backward(du, g_sum, gx_sum, rstd)
        if p.has_affine:
            self._await_column_sums()
        self.dy.write([x.astype(jnp.bfloat16) for x in dz])
        scale_inv = self._quantize(dz) if p.multiplies_fp8 else None
        plgpu.commit_smem()
        pl.when(self.cta.slab == 0)(self._store_dz)
        self._multiply(scale_inv)

    def _activation_backward(self):
        """Returns du in pieces, and for each row the sums of g and of g xhat.

        The tile of dy becomes du xhat and then du, for the sums over rows.
        """
        p = self.plan
        dus, du_xhats, g_sum, gx_sum = [], [], None, None
        read_dy, read_xhat = self.dy.reader(), self.xhat.reader()
        for first in self.pieces:
            dy = read_dy(first).astype(jnp.float32)
            xhat = self._widen(read_xhat(first))
            du = self._slope_times(dy, xhat, first)
            dus.append(self._keep(du))
            if p.norm == "none" and not p.has_affine:
                continue
            g, gx = du, du * xhat.astype(jnp.float32)
            if p.has_affine:
                du_xhats.append(gx.astype(jnp.bfloat16))
                if len(du_xhats) * self.width == self.dy.span:
                    self.dy.write(du_xhats, first + self.width - self.dy.span)
                    du_xhats.clear()
                gamma = self._per_column(self.scratch.gamma, first)
                g, gx = gamma * g, gamma * gx
            if p.norm == "layer":
                g_sum = _add(g_sum, g)
            gx_sum = _add(gx_sum, gx)
        if p.has_affine:
            self._sum_columns(0)
        g_sum, gx_sum = (
            None if x is None else jnp.sum(x, axis=1) for x in (g_sum, gx_sum)
        )
        if p.has_affine:
            self._await_column_sums()
            self.dy.write([x.astype(jnp.bfloat16) for x in dus])
            self._sum_columns(1)
        return dus, g_sum, gx_sum

    def _widen(self, xhat):
        """Returns a piece of xhat in the dtype the slope is taken in."""
        if jnp.dtype(xhat.dtype) != E4M3:
            xhat = xhat.astype(jnp.float32)  # no cast from bfloat16 to float16
        return xhat.astype(self.plan.slope_dtype)

    def _slope_times(self, dy, xhat, first):
        """Returns a piece of du = dy activation'(u)."""
        p = self.plan
        if p.activation == "none":
            return dy
        u = xhat
        if p.has_affine:
            u = u * self._per_column(self.scratch.affine.at[0], first)
            u = u + self._per_column(self.scratch.affine.at[1], first)
        elif p.xhat_scale != 1.0:
            u = u * p.xhat_scale
        if p.activation == "relu":
            return jnp.where(u > 0.0, dy, 0.0)
        if p.activation == "gelu" and p.slope_dtype == jnp.float16:
            u = jnp.minimum(jnp.maximum(u, -16.0), 16.0)  # u^2 must stay in range
        return dy * activation_slope(p.activation, u).astype(jnp.float32)

    def _keep(self, du):
        """Returns du as it waits for its norm's sums."""
        if self.plan.activation in ("none", "relu"):
            # Or du's cast back to bfloat16 is undone, and dy kept for it as well.
            return lax.optimization_barrier(du)
        return du

    def _per_column(self, ref, first):
        columns = ref.at[pl.ds(first, self.width)]
        return per_column(plgpu.load(columns, layout=tiles.PER_COLUMN))

    def _sum_columns(self, i):
        """Adds the tile in the place of dy to the i-th sums over rows."""
        plgpu.commit_smem()
        ones = self.scratch.ones.at[i].transpose((1, 0))
        side = self.plan.side
        for part in range(self.plan.parts):
            sums = self.column_sums.at[pl.ds(part * side, side)]
            plgpu.wgmma(sums, self.dy.part(part).transpose((1, 0)), ones)

    def _await_column_sums(self):
        """Waits until what was summed may be overwritten."""
        plgpu.wgmma_wait(0)
        # Each warp has waited for its own columns only, and they are sums over the rows
        # that all warps hold: this is a barrier among the four.
        plgpu.commit_smem()

    def _norm_backward(self, du, g_sum, gx_sum, rstd):
        """Returns dz in float32, in pieces."""
        p = self.plan
        if p.norm == "none":
            return du
        dz = []
        # xhat = c x, with x as stored; gamma is stored as c gamma if there is one.
        c = p.xhat_scale
        c_gamma = c if p.has_affine else 1.0
        read_xhat = self.xhat.reader()
        rows = functools.partial(per_row, columns=self.width)
        for first, g in zip(self.pieces, du, strict=True):
            on_g = rstd * (1 / c_gamma)
            on_x = -rstd * gx_sum * (c * c / (c_gamma * p.n))
            if p.has_affine:
                g = g * self._per_column(self.scratch.gamma, first)
            offset = rows(on_x) * self._widen(read_xhat(first)).astype(jnp.float32)
            if p.norm == "layer":
                offset = offset + rows(-on_g * g_sum * (1 / p.n))
            dz.append(rows(on_g) * g + offset)
        return dz

    def _quantize(self, dz):
        """Writes dz in E4M3 for the product; returns the `scale_inv` of each row."""
        largest = functools.reduce(jnp.maximum, [jnp.abs(x) for x in dz])
        amax = jnp.max(largest, axis=1)
        scale_inv = jnp.maximum(amax, _LEAST_AMAX) * (1 / fp8_max(E4M3))
        scale = per_row(1.0 / scale_inv, self.width)
        self.dz.write([(x * scale).astype(E4M3) for x in dz])
        return scale_inv

    def _store_dz(self):
        """Starts copying dz, in bfloat16, to global memory."""
        side, parts = self.plan.side, self.plan.parts
        for part in range(parts):
            plgpu.copy_smem_to_gmem(
                self.dy.part(part),
                self.cta.results.dz.at[self.rows, pl.ds(part * side, side)],
                commit_group=part == parts - 1,
            )

    def _multiply(self, scale_inv):
        """Multiplies dz with W and sends dx off."""
        p = self.plan
        slab = self.cta.slab * p.slab
        width = math.gcd(p.slab, 256)
        store = tiles.RowStore(self.scratch.dx.at[self.team])
        for start in range(0, p.slab, width):

            def product(accumulator, start=start):
                for part in range(p.parts):
                    w = self.scratch.w.at[part, pl.ds(start, width)].transpose((1, 0))
                    plgpu.wgmma(accumulator, self.dz.part(part), w)
                return accumulator[...]

            dx = pl.run_scoped(product, tiles.accumulator(ROWS, width))
            if start + width == p.slab:
                # dz was read out, by the product and by its copy.
                tiles.drain()
                self._release()
            if p.multiplies_fp8:
                dx = self._rescale(dx, scale_inv, slab + start)
            store(dx.astype(jnp.bfloat16), self.cta.results.dx, self.rows, slab + start)

    def _rescale(self, dx, scale_inv, first):
        """Returns dx times the scales of its rows and those of W."""
        w_scale, width = self.cta.inputs.w_scale, dx.shape[1]
        if not self.plan.w_scale_by_row:
            return dx * per_row(scale_inv * w_scale[0], width)
        columns = w_scale.at[pl.ds(first, width)]
        scales = plgpu.load(columns, layout=tiles.PER_COLUMN, optimized=False)
        return dx * per_row(scale_inv, width) * per_column(scales)

    def _release(self):
        """Hands the slot back; the slots of the last tiles are not filled again."""

        @pl.when(self.step + self.plan.settings.slots < self.cta.steps)
        def _():
            plgpu.barrier_arrive(self.scratch.empty.at[self.slot])


class _SharedTile:
    """A tile in shared memory, read and written in pieces of some columns.

    It is loaded and stored `span` columns at a time, the width of a swizzle, but worked
    on in narrower pieces to bound the registers.
    """

    def __init__(self, ref, slot, width: int):
        """Takes a reference of shape (slots, parts, 64, side)."""
        self._ref, self._slot, self._width = ref, slot, width
        side, itemsize = ref.shape[-1], jnp.dtype(ref.dtype).itemsize
        self.span = max(width, min(side, 128 // itemsize))

    def part(self, i: int):
        """Returns a reference to the i-th part."""
        return self._ref.at[self._slot, i]

    def reader(self):
        """Returns a function that loads the piece at some column, one after another."""
        loaded = {}

        def read(first: int):
            start = first // self.span * self.span
            if start not in loaded:
                loaded.clear()
                at = self._at(start)
                loaded[start] = plgpu.load(at, layout=plgpu.Layout.WGMMA)
            return loaded[start][:, first - start : first - start + self._width]

        return read

    def write(self, pieces: list, first: int = 0):
        """Stores pieces from a column on."""
        count = self.span // self._width
        for i in range(0, len(pieces), count):
            value = jnp.concatenate(pieces[i : i + count], axis=1)
            self._at(first + i * self._width)[...] = value

    def _at(self, first: int):
        part, column = divmod(first, self._ref.shape[-1])
        return self._ref.at[self._slot, part, :, pl.ds(column, self.span)]


def _add(total, value):
    return value if total is None else total + value
