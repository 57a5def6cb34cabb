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

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array, fp8_max
from loka_jax.normed import NORM_BLOCK, XHAT_SCALE_INV, Gradients, NormName
from loka_jax.pallas import tiles
from loka_jax.pallas.activations import ActivationName, activation_slope
from loka_jax.pallas.tiles import ROWS, per_column, per_row

_ONES = 8  # columns of the least product: half for each of two sums
_MOST_K, _MOST_N = 512, 256
_LEAST_AMAX = 1e-30  # keeps a row's scale, and its inverse, normal numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a launch is laid out.

    Attributes:
        teams: warpgroups that work on row tiles of their own.
        slots: row tiles under way in a CTA, loading, at work or storing.
        slabs: parts the rows of W are cut into, each for CTAs of its own.
        columns: of a tile that are worked on at a time.
        packed: columns whose du waits for its norm's sums in bfloat16, not float32.
        chunk: columns of an FP8 tile of shared memory.
        half: take the activation's slope in float16.
        piece: columns of dx that leave at a time.
        pieces: under way for each team.
    """

    teams: int = 2
    slots: int = 2
    slabs: int = 1
    columns: int = 32
    packed: int = 0
    chunk: int = 128
    half: bool = True
    piece: int = 64
    pieces: int = 1


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The static side of a launch."""

    m: int
    k: int
    n: int
    xhat_dtype: DTypeLike
    w_dtype: DTypeLike
    norm: NormName
    activation: ActivationName
    affine: bool  # has gamma and beta
    scales: int  # of W: one, or one a row
    settings: Settings

    @property
    def side(self) -> int:
        """Columns of dy that a TMA copy, or a part of shared memory, holds."""
        return math.gcd(self.n, tiles.TMA_SIDE)

    @property
    def parts(self) -> int:
        return self.n // self.side

    @property
    def slab(self) -> int:
        return self.k // self.settings.slabs

    @property
    def is_fp8(self) -> bool:
        return jnp.dtype(self.w_dtype).itemsize == 1

    @property
    def quantizes_in_place(self) -> bool:
        return self.is_fp8 and jnp.dtype(self.xhat_dtype).itemsize == 1

    @property
    def xhat_scale(self) -> float:
        return XHAT_SCALE_INV if jnp.dtype(self.xhat_dtype) == E4M3 else 1.0

    @property
    def half(self) -> bool:
        """Whether the slope is taken in float16, whose range z may leave."""
        return self.settings.half and self.norm != "none"

    @property
    def slope_dtype(self) -> DTypeLike:
        return jnp.float16 if self.half else jnp.float32

    @property
    def workers(self) -> int:
        """CTAs for each slab."""
        return min(self.m // ROWS, max(tiles.SMS // self.settings.slabs, 1))


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
    data, scales = (
        (w.data, w.scale_inv.reshape(-1))
        if isinstance(w, Fp8Array)
        else (w, jnp.ones((1,), jnp.float32))
    )
    m, n = dy.shape
    k = data.shape[0]
    affine = gamma is not None
    reason = why_not(
        *(m, k, n),
        xhat_dtype=xhat.dtype,
        w_dtype=data.dtype,
        norm=norm,
        activation=activation,
        settings=settings,
    )
    if reason is not None:
        raise ValueError(reason)
    if settings is None:
        settings = default_settings(
            *(m, k, n),
            xhat_dtype=xhat.dtype,
            w_dtype=data.dtype,
            norm=norm,
            activation=activation,
        )
    problem = _Problem(
        m, k, n, xhat.dtype, data.dtype, norm, activation, affine, scales.size, settings
    )
    operands = {"dy": dy, "xhat": xhat, "w": data, "scales": scales}
    if norm != "none":
        assert rstd is not None
        operands["rstd"] = rstd.reshape(-1, m)
    if gamma is not None and beta is not None:
        operands |= {"gamma": gamma, "beta": beta}
        # A constant of the program, by numpy: JAX would launch a kernel to make it.
        ones = np.zeros((2, _ONES, ROWS), jnp.bfloat16)
        ones[0, : _ONES // 2] = ones[1, _ONES // 2 :] = 1
        operands["ones"] = jnp.asarray(ones)
    results = {
        "dx": jax.ShapeDtypeStruct((m, k), jnp.bfloat16),
        "dz": jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
    }
    if affine:
        sums = jax.ShapeDtypeStruct((problem.workers, settings.teams, n), jnp.float32)
        results |= {"dgamma": sums, "dbeta": sums}

    def body(*refs, **scratch):
        names = (*operands, *results)
        _kernel(problem, dict(zip(names, refs, strict=True)), scratch)

    kernel = plgpu.kernel(
        body,
        out_type=list(results.values()),
        scratch_types=_scratch(problem),
        grid=(problem.workers, settings.slabs),
        grid_names=("worker", "slab"),
        num_threads=settings.teams + 1,
        thread_name="wg",
        interpret=interpret,
        compiler_params=tiles.compiler_params(),
    )
    out = dict(zip(results, kernel(*operands.values()), strict=True))
    dgamma, dbeta = (
        jnp.sum(out[name], axis=(0, 1)) if affine else None
        for name in ("dgamma", "dbeta")
    )
    return Gradients(out["dx"], out["dz"], dgamma, dbeta)


def why_not(
    m: int,
    k: int,
    n: int,
    *,
    xhat_dtype: DTypeLike,
    w_dtype: DTypeLike,
    norm: NormName,
    activation: ActivationName,
    settings: Settings | None = None,
) -> str | None:
    """Returns why the kernel does not serve a shape, or None if it does."""
    if m == 0 or m % ROWS:
        return f"{m=} is not a positive multiple of {ROWS}"
    for name, size, most in (("k", k, _MOST_K), ("n", n, _MOST_N)):
        if size == 0 or size % 64 or size > most:
            return f"{name}={size} is not a multiple of 64 up to {most}"
    for name, dtype in (("xhat", xhat_dtype), ("w", w_dtype)):
        if jnp.dtype(dtype) not in (jnp.dtype(E4M3), jnp.dtype(jnp.bfloat16)):
            return f"{name} is {jnp.dtype(dtype).name}, neither bfloat16 nor E4M3"
    if norm == "none" and jnp.dtype(xhat_dtype) == E4M3:
        return "without a norm xhat is in bfloat16"
    if norm == "block" and n > NORM_BLOCK and n % NORM_BLOCK:
        return f"{n=} is not a multiple of the block {NORM_BLOCK}"
    affine = norm in ("layer", "rms")
    make = functools.partial(
        _Problem, m, k, n, xhat_dtype, w_dtype, norm, activation, affine, 1
    )
    if settings is None:
        if _fitting(make) is None:
            return f"{k=} x {n=} needs more shared memory than a CTA has"
        return None
    if k % (64 * settings.slabs):
        return f"{k=} is not a multiple of 64 for each of {settings.slabs} slabs"
    used = _shared_bytes(make(settings))
    if used > tiles.SMEM_BYTES:
        return f"shared memory of {used} bytes exceeds {tiles.SMEM_BYTES}"
    return None


# In order of preference; the first that fits is the default.
_CANDIDATES = tuple(
    Settings(teams=teams, slots=slots, piece=piece, slabs=slabs)
    for slabs in (1, 2, 4)
    for teams, slots, piece in (
        (2, 4, 64),
        (2, 3, 64),
        (2, 3, 32),
        (2, 2, 64),
        (2, 2, 32),
    )
) + (Settings(teams=1, slots=1, piece=64), Settings(teams=1, slots=1, piece=32))


def default_settings(
    m: int,
    k: int,
    n: int,
    *,
    xhat_dtype: DTypeLike,
    w_dtype: DTypeLike,
    norm: NormName,
    activation: ActivationName,
) -> Settings:
    """Returns the layout that a launch of this shape has by default.

    Raises:
        ValueError: with the reason if the kernel does not serve the shape.
    """
    reason = why_not(
        *(m, k, n),
        xhat_dtype=xhat_dtype,
        w_dtype=w_dtype,
        norm=norm,
        activation=activation,
    )
    if reason is not None:
        raise ValueError(reason)
    affine = norm in ("layer", "rms")
    make = functools.partial(
        _Problem, m, k, n, xhat_dtype, w_dtype, norm, activation, affine, 1
    )
    settings = _fitting(make)
    assert settings is not None
    return settings


def _fitting(make: Callable[[Settings], _Problem]) -> Settings | None:
    for settings in _CANDIDATES:
        problem = make(settings)
        if problem.k % (64 * settings.slabs):
            continue
        if _shared_bytes(problem) <= tiles.SMEM_BYTES:
            return settings
    return None


def _shared_bytes(problem: _Problem) -> int:
    """Returns the shared memory of a CTA: each array starts at a multiple of 1 KiB."""
    total = 1024  # for the barriers
    for scratch in _scratch(problem).values():
        if not isinstance(scratch, plgpu.Barrier):
            size = math.prod(scratch.shape) * jnp.dtype(scratch.dtype).itemsize
            total += -(-size // 1024) * 1024
    return total


def _scratch(problem: _Problem) -> dict:
    """Returns the shared memory and the barriers of a CTA, by name."""
    s = problem.settings
    n, side, parts = problem.n, problem.side, problem.parts
    copies = 2 * parts
    w_rows = math.gcd(problem.slab, tiles.TMA_SIDE)
    once = parts * (problem.slab // w_rows) + problem.affine
    scratch = dict(
        w_smem=_swizzled((parts, problem.slab, side), problem.w_dtype, s.chunk),
        dy_smem=tiles.swizzled((s.slots, parts, ROWS, side), jnp.bfloat16),
        xhat_smem=_swizzled((s.slots, parts, ROWS, side), problem.xhat_dtype, s.chunk),
        dx_smem=tiles.swizzled((s.teams, s.pieces, ROWS, s.piece), jnp.bfloat16),
        # A barrier's phase is counted by each thread that waits on it: one for every
        # pair of a team and a slot.
        full=plgpu.Barrier(num_barriers=s.teams * s.slots, num_arrivals=copies),
        empty=plgpu.Barrier(num_barriers=s.slots),
        once=plgpu.Barrier(num_arrivals=once),
    )
    if problem.is_fp8 and not problem.quantizes_in_place:
        shape = (s.teams, parts, ROWS, side)
        scratch["dz_smem"] = _swizzled(shape, E4M3, s.chunk)
    if problem.affine:
        scratch["affine_smem"] = plgpu.SMEM((2, n), problem.slope_dtype)
        scratch["gamma_smem"] = plgpu.SMEM((n,), jnp.float32)
        scratch["ones_smem"] = tiles.swizzled((2, _ONES, ROWS), jnp.bfloat16)
        scratch["prepared"] = plgpu.Barrier()
    return scratch


def _swizzled(shape: tuple[int, ...], dtype: DTypeLike, columns: int):
    """Returns a shared-memory type whose tiles are `columns` wide at most."""
    itemsize = jnp.dtype(dtype).itemsize
    columns = min(columns, shape[-1], 128 // itemsize)
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore
    swizzle = plgpu.SwizzleTransform(columns * itemsize)  # pyright: ignore
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _kernel(problem: _Problem, gmem: dict, smem: dict):
    s = problem.settings
    wg = lax.axis_index("wg")
    worker = lax.axis_index("worker")
    steps = lax.div(
        problem.m // ROWS - worker + problem.workers - 1, jnp.int32(problem.workers)
    )

    @pl.when(wg == s.teams)
    def _():
        plgpu.set_max_registers(tiles.PRODUCER_REGISTERS, action="decrease")
        _produce(problem, gmem, smem, worker, steps)

    @pl.when(wg < s.teams)
    def _():
        registers = tiles.compute_registers(s.teams)
        plgpu.set_max_registers(registers, action="increase")
        _compute(problem, gmem, smem, wg, worker, steps)


def _produce(problem: _Problem, gmem: dict, smem: dict, worker, steps):
    """Copies W and the parameters once, then the tiles as their slots come free."""
    s, side = problem.settings, problem.side
    first = lax.axis_index("slab") * problem.slab
    w_rows = math.gcd(problem.slab, tiles.TMA_SIDE)

    @pl.loop(0, steps)
    def _(step):
        slot, team = lax.rem(step, s.slots), lax.rem(step, s.teams)

        @pl.when(step >= s.slots)
        def _():
            plgpu.barrier_wait(smem["empty"].at[slot])

        rows = pl.ds((worker + step * problem.workers) * ROWS, ROWS)
        full = smem["full"].at[team * s.slots + slot]
        for part in range(problem.parts):
            columns = pl.ds(part * side, side)
            for name in ("dy", "xhat"):
                plgpu.copy_gmem_to_smem(
                    gmem[name].at[rows, columns],
                    smem[name + "_smem"].at[slot, part],
                    full,
                )

        @pl.when(step == 0)  # the first tile first: W is needed last
        def _():
            if problem.affine:
                plgpu.copy_gmem_to_smem(gmem["ones"], smem["ones_smem"], smem["once"])
            for part in range(problem.parts):
                for row in range(0, problem.slab, w_rows):
                    plgpu.copy_gmem_to_smem(
                        gmem["w"].at[
                            pl.ds(first + row, w_rows), pl.ds(part * side, side)
                        ],
                        smem["w_smem"].at[part, pl.ds(row, w_rows)],
                        smem["once"],
                    )


def _compute(problem: _Problem, gmem: dict, smem: dict, team, worker, steps):
    """Turns this team's tiles into rows of dz and dx, and its column sums."""
    s = problem.settings
    mine = lax.div(steps - team + s.teams - 1, s.teams)
    plgpu.barrier_wait(smem["once"])
    if problem.affine:
        pl.when(team == 0)(lambda: _prepare(problem, gmem, smem))
        plgpu.barrier_wait(smem["prepared"])

    def tiles_of_team(column_sums=None):
        @pl.loop(0, mine)
        def _(turn):
            step = turn * s.teams + team
            _Tile(problem, gmem, smem, team, worker, step, column_sums).run()

        return None if column_sums is None else column_sums[...]

    if problem.affine:
        shape = (problem.n, _ONES)
        sums = pl.run_scoped(
            tiles_of_team, plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
        )
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        middle = _ONES // 2

        @pl.when(lax.axis_index("slab") == 0)
        def _():
            scales = {"dgamma": problem.xhat_scale, "dbeta": 1.0}
            masks = (column < middle, column >= middle)
            for (name, scale), mask in zip(scales.items(), masks, strict=True):
                total = jnp.sum(jnp.where(mask, sums, 0.0), axis=1)
                gmem[name][worker, team] = total * (scale * 2 / _ONES)
    else:
        tiles_of_team()
    tiles.drain()


def _prepare(problem: _Problem, gmem: dict, smem: dict):
    """Writes gamma and beta the way tiles read them: gamma times the scale of xhat."""
    gamma, beta = (
        plgpu.load(gmem[name], layout=tiles.PER_COLUMN, optimized=False)
        for name in ("gamma", "beta")
    )
    gamma = gamma * problem.xhat_scale
    smem["gamma_smem"][...] = gamma
    smem["affine_smem"][0] = gamma.astype(problem.slope_dtype)
    smem["affine_smem"][1] = beta.astype(problem.slope_dtype)
    plgpu.barrier_arrive(smem["prepared"])


class _Tile:
    """One team's work on one tile of rows."""

    def __init__(self, problem, gmem, smem, team, worker, step, column_sums):
        s = problem.settings
        self.problem = problem
        self.gmem, self.smem = gmem, smem
        self.team = team
        self.step = step
        self.slot = lax.rem(step, s.slots)
        self.rows = pl.ds((worker + step * problem.workers) * ROWS, ROWS)
        self.column_sums = column_sums
        # What is in registers together is loaded and stored a swizzle's width at a
        # time, and worked on in narrower pieces to bound the registers.
        self.width = min(s.columns, problem.side)
        self.pieces = range(0, problem.n, self.width)

    # Pieces of `width` columns, by their first column.

    def _read(self, name, slot):
        """Returns a function that loads a piece of a tile in shared memory."""
        ref = self.smem[name]
        wide = self._store_width(ref.dtype)
        loaded = {}

        def piece(first):
            start = first // wide * wide
            if start not in loaded:
                loaded.clear()
                loaded[start] = plgpu.load(
                    self._at(ref, slot, start), layout=plgpu.Layout.WGMMA
                )
            return loaded[start][:, first - start : first - start + self.width]

        return piece

    def _write(self, ref, slot, pieces):
        """Stores a tile given as pieces."""
        wide = self._store_width(ref.dtype)
        count = wide // self.width
        for i in range(0, len(pieces), count):
            value = pieces[i]
            if count > 1:
                value = jnp.concatenate(pieces[i : i + count], axis=1)
            self._at(ref, slot, i * self.width)[...] = value

    def _keep(self, du, first):
        """Returns du, in bfloat16 where registers are short."""
        if first >= self.problem.settings.packed:
            if self.problem.activation in ("none", "relu"):
                # Or du's cast back to bfloat16 is undone, and dy kept for it as well.
                return lax.optimization_barrier(du)
            return du
        # Without the barrier both halves of a register are made, kept and used apart.
        return lax.optimization_barrier(du.astype(jnp.bfloat16))

    def _write_dy(self, pieces):
        self._write(self.smem["dy_smem"], self.slot, pieces)

    def _store_width(self, dtype):
        wide = min(128 // jnp.dtype(dtype).itemsize, self.problem.side)
        wide = min(wide, self.problem.settings.chunk)
        return max(wide, self.width)

    def _at(self, ref, slot, first):
        side = self.problem.side
        columns = pl.ds(first % side, self._store_width(ref.dtype))
        return ref.at[slot, first // side, :, columns]

    def _columns(self, ref, first):
        columns = ref.at[pl.ds(first, self.width)]
        return per_column(plgpu.load(columns, layout=tiles.PER_COLUMN))

    def _wide(self, xhat):
        """Returns a piece of xhat in the dtype the slope is taken in."""
        if self.problem.half and jnp.dtype(xhat.dtype) != E4M3:
            xhat = xhat.astype(jnp.float32)
        return xhat.astype(jnp.float16 if self.problem.half else jnp.float32)

    def _slope_times(self, dy, xhat, first):
        p = self.problem
        if p.activation == "none":
            return dy
        u = xhat
        if p.affine:
            affine = self.smem["affine_smem"]
            u = u * self._columns(affine.at[0], first)
            u = u + self._columns(affine.at[1], first)
        elif p.xhat_scale != 1.0:
            u = u * p.xhat_scale
        if p.activation == "relu":
            return jnp.where(u > 0.0, dy, 0.0)
        if p.activation == "gelu" and p.half:  # u^2 must stay in range
            u = jnp.minimum(jnp.maximum(u, -16.0), 16.0)
        return dy * activation_slope(p.activation, u).astype(jnp.float32)

    def run(self):
        p, s, smem = self.problem, self.problem.settings, self.smem
        rstd = None
        if p.norm != "none":
            rstd = [
                plgpu.load(
                    self.gmem["rstd"].at[i, self.rows],
                    layout=tiles.PER_ROW,
                    optimized=False,
                )
                for i in range(self.gmem["rstd"].shape[0])
            ]
        plgpu.barrier_wait(smem["full"].at[self.team * s.slots + self.slot])
        du, sums = self._activation_backward()
        dz = self._norm_backward(du, sums, rstd)
        if p.affine:
            self._await_sums()
        self._write_dy([x.astype(jnp.bfloat16) for x in dz])
        scale_inv = self._quantize(dz) if p.is_fp8 else None
        plgpu.commit_smem()

        @pl.when(lax.axis_index("slab") == 0)
        def _():
            for part in range(p.parts):
                plgpu.copy_smem_to_gmem(
                    smem["dy_smem"].at[self.slot, part],
                    self.gmem["dz"].at[self.rows, pl.ds(part * p.side, p.side)],
                    commit_group=part == p.parts - 1,
                )

        self._multiply(scale_inv)

    def _activation_backward(self):
        """Returns du, in bfloat16 pieces, and the elementwise sums of g and g xhat."""
        p = self.problem
        dus, du_xhats, g_sum, gx_sum = [], [], {}, {}
        read_dy = self._read("dy_smem", self.slot)
        read_xhat = self._read("xhat_smem", self.slot)
        count = self._store_width(jnp.bfloat16) // self.width
        for first in self.pieces:
            block = self._block(first)
            dy = read_dy(first).astype(jnp.float32)
            xhat = self._wide(read_xhat(first))
            du = self._slope_times(dy, xhat, first)
            dus.append(self._keep(du, first))
            if p.norm == "none" and not p.affine:
                continue
            du_xhat = du * xhat.astype(jnp.float32)
            g, gx = du, du_xhat
            if p.affine:
                du_xhats.append(du_xhat.astype(jnp.bfloat16))
                if len(du_xhats) == count:
                    start = first + self.width - count * self.width
                    value = jnp.concatenate(du_xhats, axis=1)
                    self._at(self.smem["dy_smem"], self.slot, start)[...] = value
                    du_xhats.clear()
                gamma = self._columns(self.smem["gamma_smem"], first)
                g, gx = gamma * du, gamma * du_xhat
            if p.norm == "layer":
                g_sum[block] = g_sum[block] + g if block in g_sum else g
            gx_sum[block] = gx_sum[block] + gx if block in gx_sum else gx
        if p.affine:
            self._sum_columns(0)
        totals = [
            {block: jnp.sum(x, axis=1) for block, x in sums.items()}
            for sums in (g_sum, gx_sum)
        ]
        if p.affine:
            self._await_sums()
            self._write_dy([x.astype(jnp.bfloat16) for x in dus])
            self._sum_columns(1)
        return dus, totals

    def _block(self, first):
        """Returns the index of the statistics of a piece."""
        return first // NORM_BLOCK if self.problem.norm == "block" else 0

    def _sum_columns(self, i):
        plgpu.commit_smem()
        ones = self.smem["ones_smem"].at[i].transpose((1, 0))
        side = self.problem.side
        for part in range(self.problem.parts):
            tile = self.smem["dy_smem"].at[self.slot, part].transpose((1, 0))
            plgpu.wgmma(self.column_sums.at[pl.ds(part * side, side)], tile, ones)

    def _await_sums(self):
        """Waits until what was summed may be overwritten."""
        plgpu.wgmma_wait(0)
        # Each warp has waited for its own columns only, and they are sums over the rows
        # that all warps hold: this is a barrier among the four.
        plgpu.commit_smem()

    def _norm_backward(self, du, totals, rstd):
        """Returns dz in bfloat16 pieces."""
        p = self.problem
        if p.norm == "none":
            return [x.astype(jnp.float32) for x in du]
        g_sum, gx_sum = totals
        count = min(p.n, NORM_BLOCK) if p.norm == "block" else p.n
        dz = []
        # xhat = c x, with x as stored; gamma is stored as c gamma if there is one.
        c = p.xhat_scale
        c_gamma = c if p.affine else 1.0
        read_xhat = self._read("xhat_smem", self.slot)
        rows = functools.partial(per_row, columns=self.width)
        for first, piece in zip(self.pieces, du, strict=True):
            block = self._block(first)
            on_g = rstd[block] * (1 / c_gamma)
            on_x = -rstd[block] * gx_sum[block] * (c * c / (c_gamma * count))
            g = piece.astype(jnp.float32)
            if p.affine:
                g = g * self._columns(self.smem["gamma_smem"], first)
            offset = rows(on_x) * self._wide(read_xhat(first)).astype(jnp.float32)
            if p.norm == "layer":
                offset = offset + rows(-on_g * g_sum[block] * (1 / count))
            dz.append(rows(on_g) * g + offset)
        return dz

    def _quantize(self, dz):
        """Writes dz in E4M3 for the product; returns a scale for each row."""
        p = self.problem
        largest = functools.reduce(jnp.maximum, [jnp.abs(x) for x in dz])
        amax = jnp.max(largest, axis=1)
        scale_inv = jnp.maximum(amax, _LEAST_AMAX) * (1 / fp8_max(E4M3))
        scale = per_row(1.0 / scale_inv, self.width)
        data = [(x * scale).astype(E4M3) for x in dz]
        ref, slot = (
            (self.smem["xhat_smem"], self.slot)
            if p.quantizes_in_place
            else (self.smem["dz_smem"], self.team)
        )
        self._write(ref, slot, data)
        return scale_inv

    def _operand(self, part):
        """Returns the product's left side: in place of what it was made from."""
        p = self.problem
        if not p.is_fp8:
            return self.smem["dy_smem"].at[self.slot, part]
        if p.quantizes_in_place:
            return self.smem["xhat_smem"].at[self.slot, part]
        return self.smem["dz_smem"].at[self.team, part]

    def _multiply(self, scale_inv):
        """Multiplies dz with W and sends dx off."""
        p = self.problem
        first = lax.axis_index("slab") * p.slab
        width = math.gcd(p.slab, 256)
        store = tiles.RowStore(self.smem["dx_smem"].at[self.team])
        for start in range(0, p.slab, width):

            def product(acc, start=start):
                for part in range(p.parts):
                    rows = self.smem["w_smem"].at[part, pl.ds(start, width)]
                    plgpu.wgmma(acc, self._operand(part), rows.transpose((1, 0)))
                return acc[...]

            dx = pl.run_scoped(
                product, plgpu.WGMMAAccumulatorRef((ROWS, width), jnp.float32)
            )
            if start + width == p.slab:
                # dz was read out, by the product and by its copy.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                self._release()
            if p.is_fp8:
                dx = self._rescale(dx, scale_inv, first + start)
            store(dx.astype(jnp.bfloat16), self.gmem["dx"], self.rows, first + start)

    def _rescale(self, dx, scale_inv, first):
        p = self.problem
        if p.scales == 1:
            return dx * per_row(scale_inv * self.gmem["scales"][0], dx.shape[1])
        columns = pl.ds(first, dx.shape[1])
        scales = plgpu.load(self.gmem["scales"].at[columns], layout=tiles.PER_COLUMN)
        return dx * per_row(scale_inv, dx.shape[1]) * per_column(scales)

    def _release(self):
        """Hands the slot back, if the producer will wait for it."""
        # The last tiles' slots are not filled again.
        p = self.problem
        steps = lax.div(
            p.m // ROWS - lax.axis_index("worker") + p.workers - 1, p.workers
        )

        @pl.when(self.step + p.settings.slots < steps)
        def _():
            plgpu.barrier_arrive(self.smem["empty"].at[self.slot])
