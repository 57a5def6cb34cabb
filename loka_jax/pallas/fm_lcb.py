"""One kernel for Wukong's factorization machine and linear compression.

    P^T = [Y | W_L]^T X        FM = X P_k        LCB = the last l rows of P^T

for each example X (n, d): P_k (d, k) are the first k columns of P, FM is (n, k) and LCB
is (l, d). (Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale
Recommendation", 2024, with FM's `X X^T Y` as `X (X^T Y)`.)

A persistent CTA keeps `[Y | W_L]` in shared memory. A producer warpgroup feeds it
examples by TMA, so that X is read once; P^T goes through shared memory in bfloat16, as
the operand of the second product and as LCB on its way out. A team of warpgroups shares
an example, by slabs of 64 rows of P^T and then of FM; there are several teams, so that
one multiplies while another stores. Where an example is too large, it is taken in
chunks of d, over which FM is summed in registers.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16

from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm_tile import arrive_if, wait_if
from loka_jax.pallas.fm_lcb_layout import (
    BF16,
    LaunchLayout,
    Problem,
    Scratch,
    TuningConfig,
    best_config,
    misfit,
    search_space,
    why_not,
)
from loka_jax.pallas.tiles import ROWS

__all__ = ["Problem", "TuningConfig", "fm_lcb", "search_space", "why_not"]


def fm_lcb(
    x: BFloat16[Array, "b n d"],
    weight: BFloat16[Array, "n m"],
    k: int,
    *,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "b n k"], BFloat16[Array, "b l d"]]:
    """Returns `x (x^T weight[:, :k])` and `weight[:, k:]^T x` of every example.

    Sums are float32; x^T weight is rounded to bfloat16.

    Raises:
        ValueError: if the problem is not served (see `why_not`), or the config does not
            fit it.
    """
    assert x.dtype == weight.dtype == BF16
    (batch, n, d), m = x.shape, weight.shape[1]
    problem = Problem(batch=batch, n=n, d=d, k=k, m=m)
    reason = why_not(problem)
    if reason is not None:
        raise ValueError(f"pallas fm_lcb does not serve this site: {reason}.")
    config = config or best_config(problem)
    reason = misfit(problem, config)
    if reason is not None:
        raise ValueError(f"{config} does not fit: {reason}.")
    return tuple(_launch((problem, config), (x, weight), interpret))


@tiles.lowered_once
def _launch(static, inputs, interpret):
    layout, (x, weight) = LaunchLayout(*static), inputs
    n, m = weight.shape
    padding = ((0, layout.n_rows - n), (0, layout.m_rows - m))
    return plgpu.kernel(
        _Kernel(layout).body,
        out_type=layout.results(),
        scratch_types=layout.scratch(),
        grid=(layout.ctas,),
        grid_names=("cta",),
        num_threads=layout.config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
    )(x, jnp.pad(weight, padding))


class _Kernel:
    """The work of a CTA's warpgroups."""

    def __init__(self, layout: LaunchLayout):
        self.layout, self.config = layout, layout.config
        self.problem = layout.problem

    def body(self, *arrays, **scratch):
        """The kernel: the last warpgroup loads, the others compute."""
        (x, w, fm, lcb), refs = arrays, Scratch(**scratch)
        warpgroups, ctas = self.config.warpgroups, self.layout.ctas
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
        # This CTA's examples are `cta`, `cta + ctas`, ...
        examples = lax.div(self.problem.batch - cta + ctas - 1, ctas)

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")
            self._produce(x, w, refs, examples)

        @pl.when(warpgroup < warpgroups)
        def _():
            registers = tiles.consumer_registers(warpgroups)
            plgpu.set_max_registers(registers, action="increase")
            self._consume(warpgroup, fm, lcb, refs, examples)

    def _example(self, index):
        """Returns the position in the batch of one of this CTA's examples."""
        return lax.axis_index("cta") + index * self.layout.ctas

    def _produce(self, x, w, refs: Scratch, examples):
        """Loads the weight once, then keeps the ring buffers filled."""
        plgpu.copy_gmem_to_smem(w, refs.w, refs.w_full)
        rows, teams = pl.ds(0, self.layout.n_rows), self.layout.teams

        @pl.loop(0, examples)
        def _(index):
            for chunk in range(self.config.chunks):
                count = lax.div(index, teams) * self.config.chunks + chunk
                stage = self.layout.stage(lax.rem(index, teams), count)
                is_used = count >= self.config.pipeline_stages
                wait_if(is_used, refs.x_empty.at[stage])
                # TMA fills rows beyond n with zeros.
                source = x.at[self._example(index), rows, self._columns(chunk)]
                plgpu.copy_gmem_to_smem(source, refs.x.at[stage], refs.x_full.at[stage])

    def _columns(self, chunk: int):
        return pl.ds(chunk * self.layout.chunk, self.layout.chunk)

    def _consume(self, warpgroup, fm, lcb, refs: Scratch, examples):
        """Computes a warpgroup's part of its team's examples."""
        teams = self.layout.teams
        worker = _Worker(self.layout, refs, warpgroup, examples)
        slabs = self.layout.slabs(self.layout.n_rows, worker.member)
        accumulators = [tiles.accumulator(ROWS, self.problem.k)] * len(slabs)
        plgpu.barrier_wait(refs.w_full)

        @pl.loop(0, worker.iterations)
        def _(iteration):
            example = self._example(iteration * teams + worker.team)

            def compute(*accumulators):
                for chunk in range(self.config.chunks):
                    out = lcb.at[example, :, self._columns(chunk)]
                    worker.accumulate(iteration, chunk, slabs, accumulators, out)
                return [accumulator[...] for accumulator in accumulators]

            results = pl.run_scoped(compute, *accumulators)
            for slab, result in zip(slabs, results, strict=True):
                worker.store(result, fm.at[example], slab)

        tiles.drain()


class _Worker:
    """A warpgroup of a team."""

    def __init__(self, layout: LaunchLayout, refs: Scratch, warpgroup, examples):
        self.layout, self.refs = layout, refs
        self.config, self.problem = layout.config, layout.problem
        self.team = lax.div(warpgroup, self.config.team)
        self.member = lax.rem(warpgroup, self.config.team)
        self.p, self.staging = refs.p.at[self.team], refs.fm.at[warpgroup]
        teams = layout.teams
        self.iterations = lax.div(examples - self.team + teams - 1, teams)

    def accumulate(self, iteration, chunk: int, slabs, accumulators, lcb):
        """Adds a chunk's part to slabs of FM, and starts storing its part of LCB."""
        count = iteration * self.config.chunks + chunk
        stage = self.layout.stage(self.team, count)
        x = self.refs.x.at[stage]
        plgpu.barrier_wait(self.refs.x_full.at[stage])
        self._write_p(x, is_first=count == 0)
        of_lcb = self.p.at[pl.ds(self.problem.k, self.problem.m - self.problem.k)]
        self._by_one(lambda: plgpu.copy_smem_to_gmem(of_lcb, lcb))
        p = self.p.at[pl.ds(0, self.problem.k)].transpose((1, 0))
        for slab, accumulator in zip(slabs, accumulators, strict=True):
            plgpu.wgmma(accumulator, x.at[pl.ds(slab, ROWS)], p)
        plgpu.wgmma_wait(0)
        chunks = self.iterations * self.config.chunks
        is_needed = count + self.config.pipeline_stages < chunks
        arrive_if(is_needed, self.refs.x_empty.at[stage])
        if self.config.team > 1:
            # The team may write P^T anew once all have read it.
            self._by_one(tiles.drain)
            arrive_if(count + 1 < chunks, self.refs.p_empty.at[self.team])

    def _write_p(self, x, *, is_first):
        """Computes P^T of a chunk in shared memory, for the whole team."""
        for number, slab in enumerate(
            self.layout.slabs(self.layout.m_rows, self.member)
        ):
            rows = pl.ds(slab, ROWS)

            def product(accumulator, rows=rows):
                w = self.refs.w.at[:, rows].transpose((1, 0))
                plgpu.wgmma(accumulator, w, x)
                return accumulator[...]

            accumulator = tiles.accumulator(ROWS, self.layout.chunk)
            p = pl.run_scoped(product, accumulator)
            if number == 0:
                self._wait_until_p_is_empty(is_first)
            self.p[rows] = p.astype(BF16)
        plgpu.commit_smem()
        if self.config.team > 1:
            plgpu.barrier_arrive(self.refs.p_full.at[self.team])
            plgpu.barrier_wait(self.refs.p_full.at[self.team])

    def _wait_until_p_is_empty(self, is_first):
        if self.config.team == 1:
            tiles.drain()
        else:
            wait_if(jnp.logical_not(is_first), self.refs.p_empty.at[self.team])

    def _by_one(self, do):
        """Does something in one member of the team."""
        if self.config.team == 1:
            return do()
        pl.when(self.member == self.config.team - 1)(do)

    def store(self, result, target, slab):
        """Starts storing a slab of FM to `target` (n, k)."""
        columns = self.problem.k // self.config.fm_parts
        # A slab that overlaps the one before, or reaches beyond n, is stored in part.
        skipped = -slab % ROWS if self.config.team == 1 else 0
        rows = ROWS if self.config.team > 1 else min(ROWS, self.problem.n - slab)
        rows -= skipped
        for start in range(0, self.problem.k, columns):
            tiles.drain()
            self.staging[...] = result[:, start : start + columns].astype(BF16)
            plgpu.commit_smem()
            source = self.staging.at[pl.ds(skipped, rows)]
            at = pl.ds(slab + skipped, rows), pl.ds(start, columns)
            plgpu.copy_smem_to_gmem(source, target.at[at])
