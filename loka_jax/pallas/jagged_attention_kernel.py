"""What the warpgroups of a CTA do in a pass of attention, see `jagged_attention`."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from loka_jax import jagged
from loka_jax.fp8 import E4M3
from loka_jax.heads import Heads
from loka_jax.jagged import Spans, Visibility
from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm_tile import wait_if
from loka_jax.pallas.interleaved import as_operand, columns_in_order, row_of
from loka_jax.pallas.jagged_attention_layout import BF16, LaunchLayout, Scratch, Task
from loka_jax.pallas.jagged_attention_scores import scores_of
from loka_jax.pallas.tiles import ROWS


class Kernel:
    """The work of a CTA's warpgroups.

    Attributes:
        places: of the results: `array` is the number of an array.
    """

    def __init__(self, layout: LaunchLayout, places: Sequence[Heads]):
        self.layout, self.config, self.places = layout, layout.config, places

    def body(self, fixed, streamed, tasks, limits, results, stats, **scratch):
        """The kernel: the last warpgroup loads, the others compute.

        Args:
            stats: of the queries of a softmax: where lse goes, [heads, rows], or lse
                and delta, [heads, 2, rows].
        """
        refs = Scratch(**scratch)
        out = [dataclasses.replace(x, array=results[x.array]) for x in self.places]
        warpgroup, warpgroups = lax.axis_index("warpgroup"), self.config.warpgroups

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")
            self._produce(fixed, streamed, stats, tasks, refs)

        @pl.when(warpgroup < warpgroups)
        def _():
            registers = tiles.consumer_registers(warpgroups)
            plgpu.set_max_registers(registers, action="increase")
            worker = _Worker(self.layout, refs, warpgroup, limits, out, stats)
            self._each_task(tasks, worker.compute)
            if refs.out is not None:
                tiles.drain()

    def _each_task(self, tasks, do):
        """Calls `do(task, round, count)` for this CTA's tasks, count of blocks before.

        Every other round has the CTAs in reverse. Returns the number of tasks, and of
        blocks.
        """
        cta, ctas = lax.axis_index("cta"), self.layout.ctas
        rounds, rest = divmod(self.layout.items, ctas)

        def position(round):
            return jnp.where(lax.rem(round, 2) == 0, cta, ctas - 1 - cta)

        def work(round, count):
            item = round * ctas + position(round)
            heads = self.layout.heads
            row, head = lax.div(item, heads), lax.rem(item, heads)
            task = Task(head, *(tasks[row, i] for i in range(len(Task._fields) - 1)))
            do(task, round, count)
            return count + task.count

        mine = rounds + jnp.where(position(jnp.int32(rounds)) < rest, 1, 0)
        return mine, lax.fori_loop(0, mine, work, jnp.int32(0))

    def _produce(self, fixed, streamed, stats, tasks, refs: Scratch):
        """Keeps the buffers of fixed and streamed rows filled."""
        config, warpgroups = self.config, self.config.warpgroups
        x, y = streamed
        rings = (
            (x, refs.x, refs.x_full, refs.x_empty, config.x_stages),
            (y, refs.y, refs.y_full, refs.y_empty, config.y_stages),
        )

        def load(task, round, count):
            stage = lax.rem(round, config.fixed_stages)
            wait_if(round >= config.fixed_stages, refs.fixed_empty.at[stage])
            for i in range(warpgroups):
                rows = pl.ds(task.tile * self.layout.tile + i * ROWS, ROWS)
                for source, target in zip(fixed, (refs.a, refs.b), strict=False):
                    plgpu.copy_gmem_to_smem(
                        _part(source, rows, task.head),
                        target.at[stage * warpgroups + i],
                        refs.fixed_full.at[stage],
                    )

            @pl.loop(0, task.count)
            def _(step):
                rows = pl.ds(task.block(step) * config.block, config.block)
                for source, buffer, full, empty, stages in rings:
                    slot = lax.rem(count + step, stages)
                    wait_if(count + step >= stages, empty.at[slot])
                    is_turned = self.layout.is_fp8 and source is y
                    part = _part(source, rows, task.head, is_turned=is_turned)
                    plgpu.copy_gmem_to_smem(part, buffer.at[slot], full.at[slot])
                    if source is x and refs.of_queries is not None:
                        part, buffer = stats.at[task.head, :, rows], refs.of_queries
                        plgpu.copy_gmem_to_smem(part, buffer.at[slot], full.at[slot])

        rounds, count = self._each_task(tasks, load)
        # All have been read when the kernel ends.
        ends = [(count, empty, stages) for *_, empty, stages in rings]
        ends.append((rounds, refs.fixed_empty, config.fixed_stages))
        for total, empty, stages in ends:
            for last in range(stages):
                number = total - 1 - last
                wait_if(number >= 0, empty.at[lax.rem(number + stages, stages)])


def _part(heads: Heads, rows, head, *, is_turned: bool = False):
    """Returns some rows of a head; where they are columns, its columns are rows."""
    columns = pl.ds(heads.first + head * heads.size, heads.size)
    return heads.array.at[(columns, rows) if is_turned else (rows, columns)]


class _Worker:
    """A warpgroup that computes 64 rows of each tile."""

    def __init__(
        self, layout: LaunchLayout, refs: Scratch, warpgroup, limits, out, stats
    ):
        self.layout, self.config, self.kind = layout, layout.config, layout.kind
        self.refs, self.warpgroup, self.limits, self.out = refs, warpgroup, limits, out
        self.stats, self.scores = stats, scores_of(layout, refs, stats)

    def _meet(self):
        """Waits for the other warpgroup: one goes on to products, one from them."""
        if self.layout.takes_turns:
            plgpu.barrier_arrive(self.refs.turn)
            plgpu.barrier_wait(self.refs.turn)

    def compute(self, task: Task, round, count):
        """Computes and stores a warpgroup's part of a task."""
        refs, warpgroups = self.refs, self.config.warpgroups
        stage = lax.rem(round, self.config.fixed_stages)
        own = stage * warpgroups + self.warpgroup
        row = task.tile * self.layout.tile + self.warpgroup * ROWS
        plgpu.barrier_wait(refs.fixed_full.at[stage])
        limits = None if self.kind.by_key else self._limits(row, ROWS, tiles.PER_ROW)

        start = self.scores.start(task.head, row)

        def accumulate(*sums):
            # The first warpgroup goes ahead by half a step.
            pl.when(self.warpgroup == 1)(self._meet)

            @pl.loop(0, task.count, init_carry=start)
            def kept(step, kept):
                # Or LLVM would keep the operands' descriptors in registers: many.
                fixed = self._fixed(lax.optimization_barrier(own))
                number, rows = (step, count + step), (row, limits)
                return self._step(task, number, fixed, rows, sums, kept)

            pl.when(self.warpgroup == 0)(self._meet)
            totals = [total[...] for total in sums]
            pl.when(task.count > 0)(lambda: self._release(count + task.count - 1))
            return totals, kept

        sums = [tiles.accumulator(ROWS, self.layout.size) for _ in self.out]
        totals, kept = pl.run_scoped(accumulate, *sums)
        place = pl.ds(row, ROWS), task.head
        if refs.out is None:
            # The fixed rows have been read: results leave by way of their memory.
            self._store(totals, kept, self._fixed(own)[: len(sums)], place)
            tiles.drain()
        plgpu.barrier_arrive(refs.fixed_empty.at[stage])
        if refs.out is not None:
            tiles.drain()  # of the task before
            self._store(totals, kept, [refs.out.at[self.warpgroup]], place)

    def _store(self, totals, kept, buffers, place):
        """Starts storing results, by way of buffers."""
        results = self.scores.results(totals, kept)
        for result, buffer in zip(results, buffers, strict=True):
            buffer[...] = result.astype(BF16)
        if (lse := self.scores.lse(kept)) is not None:
            self.refs.lse.at[self.warpgroup][...] = lse
        plgpu.commit_smem()
        for buffer, out in zip(buffers, self.out, strict=True):
            plgpu.copy_smem_to_gmem(buffer, _part(out, *place))
        if lse is not None:
            rows, head = place
            own = self.refs.lse.at[self.warpgroup]
            plgpu.copy_smem_to_gmem(own, self.stats.at[head, rows])

    def _fixed(self, own):
        """Returns a warpgroup's fixed rows."""
        return [z.at[own] for z in (self.refs.a, self.refs.b) if z is not None]

    def _step(self, task: Task, number, fixed, rows, sums, kept):
        """Adds a block's part to the sums; returns what is kept for the next.

        Args:
            number: of the block, in the task and in all.
        """
        (step, count), refs, config, kind = number, self.refs, self.config, self.kind
        slots = lax.rem(count, config.x_stages), lax.rem(count, config.y_stages)
        x, y = refs.x.at[slots[0]], refs.y.at[slots[1]]
        plgpu.barrier_wait(refs.x_full.at[slots[0]])
        if kind.has_slopes:
            plgpu.barrier_wait(refs.y_full.at[slots[1]])
        products = self._products(fixed, (x, y))
        # Reading the scores has waited for the products of the step before as well.
        pl.when(step > 0)(lambda: self._release(count - 1))
        kept = self.scores.of_block(slots[0], kept)
        if not kind.has_slopes:
            plgpu.barrier_arrive(refs.x_empty.at[slots[0]])
        if not kind.has_values:
            plgpu.barrier_arrive(refs.y_empty.at[slots[1]])
        seen = functools.partial(self._seen, task, task.block(step), rows)
        kept, weights = self.scores.weigh(products, sums, kept, seen)
        if self.layout.takes_turns:
            plgpu.barrier_arrive(refs.turn)
        if not kind.has_slopes:
            plgpu.barrier_wait(refs.y_full.at[slots[1]])
        if self.layout.takes_turns:
            plgpu.barrier_wait(refs.turn)
        y = y.transpose((1, 0)) if self.layout.is_fp8 else y
        streamed = [x] * kind.has_slopes + [y] * kind.has_values
        for total, weight, operand in zip(sums, weights, streamed, strict=True):
            plgpu.wgmma(total, self._operand(weight), operand)
        if not config.overlaps:
            plgpu.wgmma_wait(0)
        return kept

    def _release(self, count):
        """Releases what the sums have read of a block."""
        refs, config = self.refs, self.config
        if self.kind.has_slopes:
            plgpu.barrier_arrive(refs.x_empty.at[lax.rem(count, config.x_stages)])
        if self.kind.has_values:
            plgpu.barrier_arrive(refs.y_empty.at[lax.rem(count, config.y_stages)])

    def _products(self, fixed, streamed):
        """Returns `a x^T`, and `b y^T` where slopes are wanted."""

        def multiply(*accumulators):
            for accumulator, lhs, rhs in zip(
                accumulators, fixed, streamed, strict=False
            ):
                plgpu.wgmma(accumulator, lhs, rhs.transpose((1, 0)))
            self._meet()
            return [accumulator[...] for accumulator in accumulators]

        types = [tiles.accumulator(ROWS, self.config.block) for _ in fixed]
        return pl.run_scoped(multiply, *types)

    def _seen(self, task: Task, block, rows, weights, hidden: float | None = None):
        """Returns operands of the sums: 0 where a query does not see a key.

        Args:
            hidden: for scores, which are no operands yet, in place of 0.
        """

        def masked(*weights):
            mask, other = self._mask(block, *rows), hidden or 0
            return [jnp.where(mask, w, w.dtype.type(other)) for w in weights]

        def seen(weights):
            own = lambda *x: list(x)  # noqa: E731
            return lax.cond(task.is_full(block), own, masked, *weights)

        if self.layout.is_fp8:  # no mask is of 8 bits; a GPU's cast saturates
            return [weight.astype(E4M3) for weight in seen(weights)]
        if hidden is not None:
            return seen(weights)
        return seen([weight.astype(BF16) for weight in weights])

    def _mask(self, block, row, limits):
        """Returns which query sees which key."""
        size = self.config.block
        shape, start = (ROWS, size), block * size
        iota = lambda axis: plgpu.broadcasted_iota(  # noqa: E731
            jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA
        )
        if self.kind.by_key:
            keys = iota(0) + row
            limits = self._limits(start, size, tiles.PER_COLUMN)
            spread = lambda z: tiles.per_column(z, ROWS)  # noqa: E731
        else:
            keys = (row_of(iota(1)) if self.layout.is_fp8 else iota(1)) + start
            spread = lambda z: tiles.per_row(z, size)  # noqa: E731
        return jagged.is_visible(jax.tree.map(spread, limits), keys)

    def _limits(self, start, count: int, layout) -> Visibility:
        """Returns what some queries see."""
        rows = pl.ds(start, count)
        loaded = [
            plgpu.load(limit.at[rows], layout=layout, optimized=False)
            for limit in self.limits
        ]
        first, last, *others = loaded
        second = others[:2] if len(others) >= 2 else (None, None)
        itself = others[-1] if len(others) % 2 else None
        return Visibility(Spans(first, last, *second), itself, seen_by=())  # pyright: ignore

    def _operand(self, weight):
        """Returns the operand of a product; the interpreter needs it in memory."""
        if self.refs.weights is None:
            return as_operand(weight) if self.layout.is_fp8 else weight
        weight = columns_in_order(weight) if self.layout.is_fp8 else weight
        memory = self.refs.weights.at[self.warpgroup]
        memory[...] = weight
        plgpu.commit_smem()
        return memory
