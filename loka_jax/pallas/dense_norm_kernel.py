"""A launch of `dense_norm`, and the work of its warpgroups.

A producer warpgroup feeds x by TMA to consumer warpgroups. A consumer's products start
when those of the previous consumer are done ("ping-pong"), so that the tensor cores
multiply for one consumer while the others normalize.
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
from loka_jax.pallas.dense_norm_layout import (
    Inputs,
    LaunchLayout,
    Results,
    Scratch,
    present,
)
from loka_jax.pallas.dense_norm_tile import (
    Position,
    Tile,
    affine_refs,
    arrive_if,
    vector_ref,
    wait_if,
)
from loka_jax.pallas.tiles import PER_COLUMN, ROWS, per_column, per_row

# The reciprocal of a smaller row scale would leave float16's range.
_MIN_ROW_SCALE = 2.0**-14


class Kernel:
    """A launch and the kernel's body."""

    def __init__(self, layout: LaunchLayout, epsilon: float):
        """Takes the launch layout, and the summand of the variance."""
        self.layout, self.epsilon = layout, epsilon
        self.config, self.problem = layout.config, layout.problem
        self.spec, self.want = layout.spec, layout.want

    def launch(self, inputs: Inputs, interpret) -> Normed:
        """Runs the kernel."""
        results, scratch = self.layout.results(), self.layout.scratch()
        m_ctas, n_tiles = self.layout.m_ctas, self.config.n_tiles
        mesh: dict[str, Any]
        if self.layout.exchanges:
            mesh = dict(grid=(m_ctas,), grid_names=("m_cta",))
            mesh |= dict(cluster=(n_tiles,), cluster_names=("n_tile",))
        else:
            mesh = dict(grid=(m_ctas, n_tiles), grid_names=("m_cta", "n_tile"))

        def body(*refs):
            refs = iter(refs)
            self._body(*(_fill(like, refs) for like in (inputs, results, scratch)))

        outputs = plgpu.kernel(
            body,
            out_type=present(results),
            scratch_types=present(scratch),
            **mesh,
            num_threads=self.config.consumer_warpgroups + 1,
            thread_name="warpgroup",
            compiler_params=tiles.compiler_params(),
            interpret=interpret,
        )(*present(inputs))
        out = _fill(results, iter(outputs))
        y_fp8 = None
        if out.y_fp8 is not None:
            row_scale, y_scale = out.y_scale, inputs.y_scale
            scale = y_scale.reshape(()) if row_scale is None else row_scale[:, None]
            y_fp8 = Fp8Array(out.y_fp8, scale)
        return Normed(out.y, y_fp8, out.xhat, out.rstd, out.y_amax)

    def _body(self, inputs: Inputs, results: Results, scratch: Scratch):
        consumers, m_ctas = self.config.consumer_warpgroups, self.layout.m_ctas
        warpgroup, m_cta = lax.axis_index("warpgroup"), lax.axis_index("m_cta")
        n_tile = lax.axis_index("n_tile") if self.config.n_tiles > 1 else 0
        m_tiles = lax.div(self.layout.m_tiles - m_cta + m_ctas - 1, m_ctas)
        position = Position(m_cta, n_tile, m_tiles)

        @pl.when(warpgroup == consumers)
        def _():
            plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")
            self._produce(inputs, scratch, position)

        @pl.when(warpgroup < consumers)
        def _():
            registers = tiles.consumer_registers(consumers)
            plgpu.set_max_registers(registers, action="increase")
            self._consume(warpgroup, inputs, results, scratch, position)

    def _rows(self, position: Position, m_tile):
        """Returns the rows of a CTA's row tile."""
        return pl.ds((position.m_cta + m_tile * self.layout.m_ctas) * ROWS, ROWS)

    def _stage(self, consumer, k_tile):
        """Returns the ring buffers' stage of a consumer's K tile, counted over rows."""
        stages = self.config.pipeline_stages
        return consumer * stages + lax.rem(k_tile, stages)

    def _produce(self, inputs: Inputs, scratch: Scratch, position: Position):
        """Loads vectors and weight once, then keeps the ring buffers of x filled."""
        layout, consumers = self.layout, self.config.consumer_warpgroups
        columns = pl.ds(position.n_tile * layout.tile_n, layout.tile_n)
        # The vectors first: consumers prepare them while the weight is in flight.
        for i, name in enumerate(layout.vectors):
            source = getattr(inputs, name).at[columns]
            target = scratch.vectors.at[i]
            plgpu.copy_gmem_to_smem(source, target, scratch.vectors_full)
        for k in range(layout.k_tiles):
            source = inputs.w.at[columns, pl.ds(k * layout.tile_k, layout.tile_k)]
            plgpu.copy_gmem_to_smem(source, scratch.w.at[k], scratch.w_full)

        @pl.loop(0, position.m_tiles)
        def _(m_tile):
            consumer, iteration = lax.rem(m_tile, consumers), lax.div(m_tile, consumers)
            rows = self._rows(position, m_tile)
            if self.problem.x_scale_by_row:
                half = lax.rem(iteration, 2)
                stage = 2 * consumer + half
                wait_if(iteration >= 2, scratch.x_scale_empty.at[stage])
                target, barrier = (
                    scratch.x_scale.at[consumer, half],
                    scratch.x_scale_full,
                )
                source = inputs.x_scale.at[rows]
                plgpu.copy_gmem_to_smem(source, target, barrier.at[stage])
            for k in range(layout.k_tiles):
                k_tile = iteration * layout.k_tiles + k
                stage = self._stage(consumer, k_tile)
                wait_if(
                    k_tile >= self.config.pipeline_stages, scratch.x_empty.at[stage]
                )
                source = inputs.x.at[rows, pl.ds(k * layout.tile_k, layout.tile_k)]
                target, barrier = scratch.x.at[stage], scratch.x_full.at[stage]
                plgpu.copy_gmem_to_smem(source, target, barrier)

    def _consume(self, consumer, inputs, results, scratch, position: Position):
        """Computes the row tiles of a consumer."""
        consumers = self.config.consumer_warpgroups
        scale = _product_of_scalars(inputs.x_scale, inputs.w_scale)
        to_fp8 = None if inputs.y_scale is None else 1.0 / inputs.y_scale[0]
        if self.layout.vectors:
            plgpu.barrier_wait(scratch.vectors_full)
        if self.problem.has_affine:
            pl.when(consumer == 0)(lambda: self._prepare_affine(scratch))
            plgpu.barrier_wait(scratch.affine_full)
        plgpu.barrier_wait(scratch.w_full)

        @pl.loop(0, position.iterations(consumer, consumers))
        def _(iteration):
            m_tile = iteration * consumers + consumer
            z = self._multiply(consumer, iteration, scratch, position)
            tile = Tile(self.layout, consumer, iteration, scratch, position)
            row_scale = scale
            if self.problem.x_scale_by_row:
                row_scale = tile.x_scale()
                row_scale = row_scale if scale is None else row_scale * scale
            # The stores of this consumer's previous tile must have left shared memory.
            tiles.drain()
            rows = self._rows(position, m_tile)
            self._finish(z, row_scale, to_fp8, tile, results, rows)

        tiles.drain()

    def _prepare_affine(self, scratch: Scratch):
        """Scales gamma and beta once, so that row tiles need not."""
        factor = input_scale(self.spec.activation)
        values = [
            plgpu.load(vector_ref(self.layout, scratch, name), layout=PER_COLUMN)
            for name in ("gamma", "beta")
        ]
        # Every warp reads all columns, and may be about to overwrite them for others.
        plgpu.commit_smem()
        targets = affine_refs(self.layout, scratch)
        for value, target in zip(values, targets, strict=True):
            target[...] = (value * factor).astype(self.layout.epilogue_dtype)
        plgpu.barrier_arrive(scratch.affine_full)

    def _multiply(self, consumer, iteration, scratch: Scratch, position: Position):
        """Returns `x W^T` of a row tile, (64, tile_n), in float32 without scales."""
        consumers, k_tiles = self.config.consumer_warpgroups, self.layout.k_tiles
        m_tile = iteration * consumers + consumer

        def product(accumulator):
            for k in range(k_tiles):
                stage = self._stage(consumer, iteration * k_tiles + k)
                plgpu.barrier_wait(scratch.x_full.at[stage])
                if k == 0 and consumers > 1:
                    wait_if(m_tile > 0, scratch.mma_order.at[consumer])
                weight = scratch.w.at[k].transpose((1, 0))
                plgpu.wgmma(accumulator, scratch.x.at[stage], weight)
                if k > 0:
                    plgpu.wgmma_wait(1)
                    self._release(consumer, iteration, k - 1, scratch, position)
            return accumulator[...]

        z = pl.run_scoped(product, tiles.accumulator(ROWS, self.layout.tile_n))
        if consumers > 1:
            following = scratch.mma_order.at[lax.rem(consumer + 1, consumers)]
            arrive_if(m_tile + 1 < position.m_tiles, following)
        self._release(consumer, iteration, k_tiles - 1, scratch, position)
        return z

    def _release(self, consumer, iteration, k, scratch: Scratch, position: Position):
        """Returns a K tile's stage to the producer, if the producer needs it."""
        k_tiles = self.layout.k_tiles
        k_tile = iteration * k_tiles + k
        is_needed = (
            k_tile + self.config.pipeline_stages
            < position.iterations(consumer, self.config.consumer_warpgroups) * k_tiles
        )
        arrive_if(is_needed, scratch.x_empty.at[self._stage(consumer, k_tile)])

    def _finish(self, z, scale, to_fp8, tile: Tile, results: Results, rows):
        """Normalizes, activates and stores a row tile."""
        want, tile_n = self.want, self.layout.tile_n
        if self.problem.w_scale_by_column:
            z = z * per_column(tile.column_values("w_scale"))
        if self.spec.use_bias:
            z = z if scale is None else z * self._per_row(scale)
            z, scale = z + per_column(tile.column_values("bias")), None
        z, rstd, factor = self._normalize(z, scale, tile)
        if want.rstd:
            by_block = self.spec.norm == "block" and self.config.n_tiles > 1
            target = results.rstd.at[tile.n_tile] if by_block else results.rstd
            tile.store_row_values(0, rstd, target, rows, by_n_tile=by_block)
        z = z.astype(self.layout.epilogue_dtype)
        # By subtiles fewer values are alive at a time; a row scale needs them all.
        size = self.config.store_subtile_bytes // (1 if self.layout.writes_fp8 else 2)
        size = tile_n if want.y_fp8 == "rowwise" else size
        amax = None
        for start in range(0, tile_n, size):
            part = z[:, start : start + size]
            if want.xhat is not None:
                xhat = part * (1 / XHAT_SCALE_INV) if want.xhat == E4M3 else part
                tile.store(xhat, results.xhat, rows, start)
            y = self._activate(part, factor, tile, start)
            if want.y:
                tile.store(y, results.y, rows, start)
            if want.y_fp8 == "rowwise" or want.y_amax:
                largest = jnp.max(jnp.abs(y), axis=1).astype(jnp.float32)
                amax = largest if amax is None else jnp.maximum(amax, largest)
            if want.y_fp8 == "rowwise":
                to_fp8 = per_row(self._row_scale(amax, tile, results, rows), size)
            if want.y_fp8:
                tile.store(y * to_fp8.astype(y.dtype), results.y_fp8, rows, start)
        if want.y_amax:
            target = results.y_amax.at[tile.n_tile]
            tile.store_row_values(1, amax, target, rows, by_n_tile=True)

    def _row_scale(self, amax, tile: Tile, results: Results, rows):
        """Stores the scales of the rows and returns their reciprocals."""
        if self.layout.exchanges:
            (amax,) = tile.exchange(self.layout.exchanges - 1, (amax,), jnp.maximum)
        scale_inv = tiles.row_scale_inv(amax, _MIN_ROW_SCALE)
        tile.store_row_values(2, scale_inv, results.y_scale, rows)
        return 1.0 / scale_inv

    def _activate(self, v, factor, tile: Tile, start: int):
        """Returns columns of the activations, from the result of `_normalize`."""
        if self.problem.has_affine:
            gamma, beta = tile.affine(start, v.shape[1])
            v = v * per_column(gamma) + per_column(beta)
        elif factor != 1.0:
            v = v * factor
        return activate_scaled(self.spec.activation, v)

    def _normalize(self, z, scale, tile: Tile):
        """Returns the normalized tile, rstd, and a factor still to apply.

        A scale of z is not applied to z: it affects a norm only through epsilon. The
        factor is the activation's input scale, applied here where that is free.
        """
        factor = input_scale(self.spec.activation)
        is_last = not self.problem.has_affine and self.want.xhat is None
        here, later = (factor, 1.0) if is_last else (1.0, factor)
        if self.spec.norm == "none":
            if scale is not None:
                z = z * self._per_row(scale * here)
            elif here != 1.0:
                z = z * here
            return z, None, later
        sums = [jnp.sum(z * z, axis=1)]
        if self.spec.norm == "layer":
            sums.append(jnp.sum(z, axis=1))
        features = self.layout.tile_n if self.spec.norm == "block" else self.spec.n
        if self.layout.exchanges and self.spec.norm != "block":
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
        z = z * per_row(rate, self.layout.tile_n)
        if mean:
            z = z - per_row(mean[0] * rate, self.layout.tile_n)
        return z, rstd, later

    def _per_row(self, value):
        """Returns the factor of a tile: a scalar as it is, values of rows broadcast."""
        return per_row(value, self.layout.tile_n) if value.ndim else value


def _fill(like, values):
    """Returns `like` with its values that are not None replaced by the next ones."""
    return type(like)(*(None if v is None else next(values) for v in like))


def _product_of_scalars(*scales):
    """Returns the product of the scales of one element, None if there are none."""
    numbers = [s[0] for s in scales if s is not None and s.shape[0] == 1]
    return math.prod(numbers[1:], start=numbers[0]) if numbers else None
