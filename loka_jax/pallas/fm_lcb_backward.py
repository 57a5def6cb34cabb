"""One kernel for the backward pass of Wukong's FM and linear compression.

With `FM = X X^T Y` and `LCB = W_L^T X` (see `fm_lcb.py`), for each example X (n, d):

    S  = dFM Y^T + Y dFM^T                      (n, n), symmetric
    dX = S X + W_L dLCB + [A_1; ...; A_p]
    dY = sum over examples of (X X^T) dFM       dW_L = sum over examples of X dLCB^T

A_i, of which there may be none, are the rows of another gradient of X: a residual's.

Every product has n rows, of which a warpgroup computes a slab of 64: a team of as many
warpgroups as there are slabs shares an example. A persistent CTA keeps Y and W_L in
shared memory. A producer warpgroup feeds the teams by TMA, each with examples of its
own. A warpgroup's rows of S and X X^T go through shared memory in bfloat16. Its rows of
the weights' gradients stay in registers over all its examples; they are written once,
and added up afterwards in a fixed order.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32

from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm_tile import arrive_if, wait_if
from loka_jax.pallas.fm_lcb_backward_layout import (
    BackwardConfig,
    BackwardLayout,
    Scratch,
    best_config,
    misfit,
    search_space,
    why_not,
    why_not_added,
)
from loka_jax.pallas.fm_lcb_layout import BF16, Problem
from loka_jax.pallas.tiles import ROWS

__all__ = [
    "BackwardConfig",
    "Problem",
    "fm_lcb_backward",
    "search_space",
    "why_not",
    "why_not_added",
]


def fm_lcb_backward(
    x: BFloat16[Array, "b n d"],
    weight: BFloat16[Array, "n m"],
    dfm: BFloat16[Array, "b n k"],
    dlcb: BFloat16[Array, "b l d"],
    added: tuple[BFloat16[Array, "b _ d"], ...] = (),
    *,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "b n d"], Float32[Array, "n m"]]:
    """Returns the gradients of `fm_lcb` with respect to x and the weight.

    Sums are float32; S and X X^T are rounded to bfloat16. A fixed order of the sums
    makes launches agree bit by bit.

    Args:
        added: rows of a gradient that is added to that of x, n in all; or none.

    Raises:
        ValueError: if the problem is not served (see `why_not`), or the config does not
            fit it.
    """
    assert {a.dtype for a in (x, weight, dfm, dlcb, *added)} == {jnp.dtype(BF16)}
    (batch, n, d), m, k = x.shape, weight.shape[1], dfm.shape[2]
    problem = Problem(batch=batch, n=n, d=d, k=k, m=m)
    counts = tuple(rows.shape[1] for rows in added)
    assert sum(counts) in (0, n)
    reason = why_not(problem) or why_not_added(counts)
    if reason is not None:
        raise ValueError(f"pallas fm_lcb_backward does not serve this site: {reason}.")
    config = config or best_config(problem)
    reason = misfit(problem, config)
    if reason is not None:
        raise ValueError(f"{config} does not fit: {reason}.")
    inputs = (x, dfm, dlcb, weight, *added)
    return _launch((problem, config, counts), inputs, interpret)


@tiles.lowered_once
def _launch(static, inputs, interpret):
    layout = BackwardLayout(*static)
    dx, partials = plgpu.kernel(
        _Kernel(layout).body,
        out_type=layout.results(),
        scratch_types=layout.scratch(),
        grid=(layout.ctas,),
        grid_names=("cta",),
        num_threads=layout.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=tiles.compiler_params(),
        interpret=interpret,
    )(*inputs)
    return dx, _join_slabs(layout, jnp.sum(partials, axis=(0, 1)))


def _join_slabs(layout: BackwardLayout, slabs):
    """Returns the rows of overlapping slabs (slabs, 64, m), without padding."""
    pairs = zip(layout.slabs, slabs, strict=True)
    rows = [rows[layout.skipped(slab) :] for slab, rows in pairs]
    return jnp.concatenate(rows)[: layout.problem.n]


class _Kernel:
    """The work of a CTA's warpgroups."""

    def __init__(self, layout: BackwardLayout):
        self.layout, self.config = layout, layout.config
        self.problem = layout.problem

    def body(self, *arrays, **scratch):
        """The kernel: the last warpgroup loads, the others compute."""
        (*arrays, dx, partials), refs = arrays, Scratch(**scratch)
        x, dfm, dlcb, weight, *added = arrays
        warpgroups, ctas = self.layout.warpgroups, self.layout.ctas
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
        # This CTA's examples are `cta`, `cta + ctas`, ...
        count = lax.div(self.problem.batch - cta + ctas - 1, ctas)

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")
            self._load_weight(weight, refs)
            self._produce((x, dfm, dlcb), refs, count)

        @pl.when(warpgroup < warpgroups)
        def _():
            registers = tiles.consumer_registers(warpgroups)
            plgpu.set_max_registers(registers, action="increase")
            self._consume(warpgroup, (added, dx, partials), refs, count)

    def _example(self, index):
        """Returns the position in the batch of one of this CTA's examples."""
        return lax.axis_index("cta") + index * self.layout.ctas

    def _load_weight(self, weight, refs: Scratch):
        """Starts loading `[Y | W_L]`; TMA fills rows beyond n with zeros."""
        first = 0
        for ref in (refs.y, refs.w):
            rows, columns = ref.shape
            part = weight.at[pl.ds(0, rows), pl.ds(first, columns)]
            plgpu.copy_gmem_to_smem(part, ref, refs.weight_full)
            first += columns

    def _produce(self, sources, refs: Scratch, count):
        """Keeps the ring buffers of x, dFM and dLCB filled."""
        teams, stages = self.config.teams, self.config.pipeline_stages
        buffers = refs.x, refs.dfm, refs.dlcb

        @pl.loop(0, count)
        def _(index):
            iteration = lax.div(index, teams)
            stage = self.layout.stage(lax.rem(index, teams), iteration)
            wait_if(iteration >= stages, refs.empty.at[stage])
            for source, buffer in zip(sources, buffers, strict=True):
                # TMA fills rows beyond n with zeros.
                part = source.at[self._example(index), pl.ds(0, buffer.shape[1])]
                plgpu.copy_gmem_to_smem(part, buffer.at[stage], refs.full.at[stage])

    def _consume(self, warpgroup, arrays, refs: Scratch, count):
        """Computes a warpgroup's slab of its team's examples."""
        slabs, teams = self.layout.slabs, self.config.teams
        team, member = lax.div(warpgroup, len(slabs)), lax.rem(warpgroup, len(slabs))
        iterations = lax.div(count - team + teams - 1, teams)
        plgpu.barrier_wait(refs.weight_full)
        for i, slab in enumerate(slabs):
            worker = _Worker(self.layout, refs, warpgroup, slab)

            @pl.when(member == i)
            def _(worker=worker, i=i):
                self._compute(worker, arrays, (team, i), iterations)

        tiles.drain()

    def _compute(self, worker: "_Worker", arrays, position, iterations):
        """Computes the gradients of all examples of a warpgroup."""
        (added, dx, partials), team = arrays, position[0]

        def compute(*accumulators):
            @pl.loop(0, iterations)
            def _(iteration):
                example = self._example(iteration * self.config.teams + team)
                stage = self.layout.stage(team, iteration)
                worker.begin([rows.at[example] for rows in added])
                plgpu.barrier_wait(worker.refs.full.at[stage])
                rows = worker.gradients(stage, *accumulators)
                is_needed = iteration + self.config.pipeline_stages < iterations
                arrive_if(is_needed, worker.refs.empty.at[stage])
                worker.store(rows, dx.at[example])

            return [accumulator[...] for accumulator in accumulators]

        k, rest = self.problem.k, self.layout.rest
        types = tiles.accumulator(ROWS, k), tiles.accumulator(ROWS, rest)
        dy, dw = pl.run_scoped(compute, *types)
        partial = partials.at[lax.axis_index("cta"), *position]
        partial[:, pl.ds(0, k)] = dy
        partial[:, pl.ds(k, rest)] = dw


class _Worker:
    """A warpgroup that computes a slab."""

    def __init__(self, layout: BackwardLayout, refs: Scratch, warpgroup, slab: int):
        self.layout, self.refs = layout, refs
        self.slab, self.rows = slab, pl.ds(slab, ROWS)
        self.s, self.gram = refs.s.at[warpgroup], refs.gram.at[warpgroup]
        self.staging = refs.dx.at[warpgroup]
        full = refs.added_full
        self.is_added: Any = None if full is None else full.at[warpgroup]

    def begin(self, added):
        """Starts loading what is added to an example's dX to where that is staged."""
        if not added:
            return
        tiles.drain()
        pieces = self.layout.pieces(self.slab)
        for source, first, row, count in pieces:
            part = added[source].at[pl.ds(first, count)]
            target = self.staging.at[pl.ds(row, count)]
            plgpu.copy_gmem_to_smem(part, target, self.is_added)
        for _ in range(self.layout.most_pieces - len(pieces)):
            plgpu.barrier_arrive(self.is_added)

    def gradients(self, stage, dy, dw):
        """Returns rows of an example's dX, and adds to those of dY and dW_L."""
        refs = self.refs
        x, dfm, dlcb = (ref.at[stage] for ref in (refs.x, refs.dfm, refs.dlcb))
        self._write_squares(x, dfm)
        plgpu.wgmma(dy, self.gram, dfm)
        plgpu.wgmma(dw, x.at[self.rows], dlcb.transpose((1, 0)))

        def product(dx):
            plgpu.wgmma(dx, self.s, x)
            plgpu.wgmma(dx, refs.w.at[self.rows], dlcb)
            return dx[...]

        dx = pl.run_scoped(product, tiles.accumulator(ROWS, self.layout.problem.d))
        plgpu.wgmma_wait(0)
        return dx

    def _write_squares(self, x, dfm):
        """Computes rows of S and of X X^T in shared memory."""
        y, rows = self.refs.y, self.rows

        def products(s, gram):
            plgpu.wgmma(s, dfm.at[rows], y.transpose((1, 0)))
            plgpu.wgmma(s, y.at[rows], dfm.transpose((1, 0)))
            plgpu.wgmma(gram, x.at[rows], x.transpose((1, 0)))
            return s[...], gram[...]

        types = [tiles.accumulator(ROWS, self.layout.n_rows)] * 2
        s, gram = pl.run_scoped(products, *types)
        # All of the warpgroup have read the last ones: it has met in `store` since.
        self.s[...] = s.astype(BF16)
        self.gram[...] = gram.astype(BF16)
        plgpu.commit_smem()

    def store(self, dx, target):
        """Starts storing the rows of a slab that are not in the one before."""
        if self.is_added is None:
            tiles.drain()
        else:
            plgpu.barrier_wait(self.is_added)
            dx += self.staging[...].astype(jnp.float32)
        self.staging[...] = dx.astype(BF16)
        plgpu.commit_smem()
        skipped = self.layout.skipped(self.slab)
        rows = min(ROWS, self.layout.problem.n - self.slab) - skipped
        source = self.staging.at[pl.ds(skipped, rows)]
        plgpu.copy_smem_to_gmem(source, target.at[pl.ds(self.slab + skipped, rows)])
