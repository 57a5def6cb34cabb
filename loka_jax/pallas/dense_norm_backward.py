"""One kernel for the backward pass of activation, norm and `x W^T`, up to dx.

    du = dy activation'(u)    u = gamma xhat + beta    g = gamma du
    dz = rstd (g - mean(g) - xhat mean(g xhat))          dx = dz W

of which RMS and block norms drop `mean(g)`, and no norm leaves `dz = du`. dz is written
once, in bfloat16, for the weight's gradient; the product takes it in FP8, one scale a
row, or as it was written where W is in bfloat16.

A producer warpgroup feeds tiles of 64 rows of dy and xhat by TMA to teams of one
warpgroup each. A tile of dy is overwritten in place: by du xhat and du, whose column
sums (the gradients of gamma and beta) the tensor cores take as products with a vector
of ones, and at last by dz. W (K, N) stays in shared memory for the whole launch; where
it is too large its rows are cut into slabs, and the CTAs of each slab repeat the rest.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from loka_jax.fp8 import Fp8Array
from loka_jax.normed import ActivationName, Gradients, NormName
from loka_jax.pallas import tiles
from loka_jax.pallas.dense_norm_backward_plan import (
    ONES,
    Inputs,
    Plan,
    Problem,
    Results,
    Scratch,
    Settings,
    lay_out,
    why_not,
)
from loka_jax.pallas.dense_norm_backward_tile import Cta, Tile
from loka_jax.pallas.tiles import ROWS

__all__ = ["Settings", "dense_norm_backward", "why_not"]


def dense_norm_backward(
    dy: Float[Array, "m n"],
    xhat: Float[Array, "m n"],
    rstd: Float[Array, "..."] | None,
    w: Float[Array, "k n"] | Fp8Array,
    *,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName,
    settings: Settings | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Gradients:
    """Returns the gradients of `activation(gamma norm(x W^T) + beta)`.

    Deterministic: sums over rows are kept by each warpgroup and added in order.

    Args:
        dy: bfloat16.
        xhat: normalized rows, bfloat16, or E4M3 with the scale `XHAT_SCALE_INV`;
            without a norm what entered the activation, bfloat16.
        rstd: float32 reciprocal deviations; None without a norm.
        w: the weight as (K, N): bfloat16, or E4M3 with one scale or one a row.
        gamma: None for norms without parameters.
        beta: as gamma.
        norm: one of `loka_jax.normed`.
        activation: what followed the norm.
        settings: the layout of the launch; chosen by shape if None.
        interpret: how to interpret the kernel on a CPU; run on the GPU if None.

    Raises:
        ValueError: with the reason if these shapes or settings are not served.
    """
    assert (gamma is None) == (beta is None)
    if isinstance(w, Fp8Array):
        data, scale = w.data, w.scale_inv.reshape(-1)
    else:
        data, scale = w, jnp.ones((1,), jnp.float32)
    (m, n), k = dy.shape, data.shape[0]
    problem = Problem(
        m=m,
        k=k,
        n=n,
        xhat_dtype=xhat.dtype,
        w_dtype=data.dtype,
        norm=norm,
        activation=activation,
        has_affine=gamma is not None,
        w_scale_by_row=scale.size > 1,
    )
    plan = lay_out(problem, settings)
    if isinstance(plan, str):
        raise ValueError(plan)
    inputs = Inputs(
        dy=dy,
        xhat=xhat,
        w=data,
        w_scale=scale,
        rstd=None if rstd is None or norm == "none" else rstd.reshape(m),
        gamma=gamma,
        beta=beta,
        ones=None if gamma is None else _ones(),
    )
    dx, dz, *by_team = _launch(plan, inputs, interpret)
    sums = (None if x is None else jnp.sum(x, axis=(0, 1)) for x in by_team)
    return Gradients(dx, dz, *sums)


def _ones() -> Array:
    """Returns the right sides of products that sum over rows, into either half."""
    # A constant of the program, by numpy: JAX would launch a kernel to make it.
    ones = np.zeros((2, ONES, ROWS), jnp.bfloat16)
    ones[0, : ONES // 2] = ones[1, ONES // 2 :] = 1
    return jnp.asarray(ones)


def _launch(plan: Plan, inputs: Inputs, interpret) -> Results:
    """Runs the kernel; dgamma and dbeta are sums by worker and team."""
    teams, slabs = plan.settings.teams, plan.settings.slabs

    def body(*refs):
        _body(plan, *refs)

    (results,) = plgpu.kernel(
        body,
        out_type=(plan.results(),),
        scratch_types=(plan.scratch(),),
        grid=(plan.workers, slabs),
        grid_names=("worker", "slab"),
        num_threads=teams + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=tiles.compiler_params(),
    )(inputs)
    return results


def _body(plan: Plan, inputs: Inputs, results: Results, scratch: Scratch):
    teams = plan.settings.teams
    wg = lax.axis_index("wg")
    cta = Cta(plan, inputs, results, scratch)
    steps = cta.steps

    @pl.when(wg == teams)
    def _():
        plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")
        _produce(cta, steps)

    @pl.when(wg < teams)
    def _():
        registers = tiles.compute_registers(teams)
        plgpu.set_max_registers(registers, action="increase")
        _work(cta, wg, steps)


def _produce(cta: Cta, steps):
    """Copies tiles as their slots come free, and once what stays."""
    p, inputs, scratch = cta.plan, cta.inputs, cta.scratch

    @pl.loop(0, steps)
    def _(step):
        slot, team = cta.slot(step), lax.rem(step, p.settings.teams)

        @pl.when(step >= p.settings.slots)
        def _():
            plgpu.barrier_wait(scratch.empty.at[slot])

        rows, full = cta.rows(step), cta.full(team, slot)
        for part in range(p.parts):
            columns = pl.ds(part * p.side, p.side)
            for source, tile in (inputs.dy, scratch.dy), (inputs.xhat, scratch.xhat):
                source, tile = source.at[rows, columns], tile.at[slot, part]
                plgpu.copy_gmem_to_smem(source, tile, full)

        # The first tile comes first: W is needed last.
        pl.when(step == 0)(lambda: _produce_once(cta))


def _produce_once(cta: Cta):
    """Copies W, and the ones that sum over rows."""
    p, inputs, scratch = cta.plan, cta.inputs, cta.scratch
    slab = cta.slab * p.slab
    if p.has_affine:
        plgpu.copy_gmem_to_smem(inputs.ones, scratch.ones, scratch.once)
    for part in range(p.parts):
        columns = pl.ds(part * p.side, p.side)
        for row in range(0, p.slab, p.w_rows):
            source = inputs.w.at[pl.ds(slab + row, p.w_rows), columns]
            target = scratch.w.at[part, pl.ds(row, p.w_rows)]
            plgpu.copy_gmem_to_smem(source, target, scratch.once)


def _work(cta: Cta, team, steps):
    """Turns this team's tiles into rows of dz and dx, and its column sums."""
    p, teams = cta.plan, cta.plan.settings.teams
    turns = lax.div(steps - team + teams - 1, teams)
    plgpu.barrier_wait(cta.scratch.once)
    if p.has_affine:
        pl.when(team == 0)(lambda: _prepare(cta))
        plgpu.barrier_wait(cta.scratch.prepared)

    def run_tiles(column_sums=None):
        @pl.loop(0, turns)
        def _(turn):
            Tile(cta, team, turn * teams + team, column_sums).run()

        return None if column_sums is None else column_sums[...]

    if p.has_affine:
        sums = pl.run_scoped(run_tiles, tiles.accumulator(p.n, ONES))
        _store_sums(cta, team, sums)
    else:
        run_tiles()
    tiles.drain()


def _prepare(cta: Cta):
    """Writes gamma and beta the way tiles read them: gamma times the scale of xhat."""
    p, scratch = cta.plan, cta.scratch
    gamma, beta = (
        plgpu.load(given, layout=tiles.PER_COLUMN, optimized=False)
        for given in (cta.inputs.gamma, cta.inputs.beta)
    )
    gamma = gamma * p.xhat_scale
    scratch.gamma[...] = gamma
    scratch.affine[0] = gamma.astype(p.slope_dtype)
    scratch.affine[1] = beta.astype(p.slope_dtype)
    plgpu.barrier_arrive(scratch.prepared)


def _store_sums(cta: Cta, team, sums):
    """Writes a team's dgamma and dbeta; either is in all columns of a half."""
    column = plgpu.broadcasted_iota(jnp.int32, sums.shape, 1, layout=plgpu.Layout.WGMMA)

    @pl.when(cta.slab == 0)
    def _():
        halves = (
            (cta.results.dgamma, cta.plan.xhat_scale, column < ONES // 2),
            (cta.results.dbeta, 1.0, column >= ONES // 2),
        )
        for target, scale, mask in halves:
            total = jnp.sum(jnp.where(mask, sums, 0.0), axis=1)
            target[cta.worker, team] = total * (scale * 2 / ONES)
