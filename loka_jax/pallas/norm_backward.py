"""Backward pass of activation and norm in one pass over rows: `norm_quantize`'s other
half, before XLA's GEMMs.

    du = dy activation'(u)    u = gamma xhat + beta    g = gamma du
    dz = rstd (g - mean(g) - xhat mean(g xhat))
    dgamma = sum over rows of du xhat    dbeta = sum over rows of du

of which RMS and block norms drop `mean(g)`, and no norm leaves `dz = du`. dz is written
in bfloat16, and in FP8 with one scale a row if asked for. Nothing but memory bandwidth
should limit it.

Rows lie in registers as in `norm_quantize`: 8 neighbouring columns a lane, all 32 lanes
of a warp, or of all four warps (folded), a row; TMA brings tiles of rows to a ring in
shared memory of each warpgroup's own. So a lane sees the same columns in every tile,
and sums over the rows stay in its registers until the last tile. They are added in a
fixed order, without atomics.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array, fp8_max
from loka_jax.normed import (
    NORM_BLOCK,
    XHAT_SCALE_INV,
    ActivationName,
    NormGradients,
    NormName,
)
from loka_jax.pallas import tiles
from loka_jax.pallas.activations import input_scale, slope_scaled

MAX_COLUMNS = 4096  # a row of more does not fit in the registers
_WIDE = 1024  # columns beyond which the column sums of unfolded rows spill registers
_WIDE_BLOCK = 2048  # the same for block norms, which have no such sums
_FOLD = 4  # warps of a warpgroup
_MULTIPLE = 128  # of columns, for lanes without gaps
_EXCHANGES = 3  # of a folded row between warps: sums of g and g xhat, and amax
_SMEM_RESERVE = 3 * 1024  # for barriers and exchanges, and starts at multiples of 1 KiB
# As in `fp8.compute_scale_inv`: the least scale whose reciprocal is finite, and that is
# no denormal itself.
_MIN_SCALE_INV = 2 * float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a launch is laid out.

    Attributes:
        rows: rows of a tile that each lane has a part of.
        stages: tiles in the ring in shared memory.
        warpgroups: to a CTA, each with tiles and a ring of its own. The more there are
            the fewer registers the compiler gives each. There is one CTA to an SM.
        folded: all warps of a warpgroup share a row, for multiples of 512 columns, not
            for block norms; else each warp has rows of its own.
        resident: keep gamma and beta in registers over all tiles of a CTA.
    """

    rows: int = 1
    stages: int = 4
    warpgroups: int = 4
    folded: bool = False
    resident: bool = True

    @property
    def fold(self) -> int:
        """Warps that share a row."""
        return _FOLD if self.folded else 1

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return _FOLD // self.fold * self.rows


def why_not(
    m: int,
    n: int,
    *,
    norm: NormName,
    xhat_dtype: DTypeLike,
    settings: Settings | None = None,
) -> str | None:
    """Returns why rows of this shape are not served, or None if they are."""
    if m == 0 or m % tiles.ROWS:
        return f"m={m} is not a positive multiple of {tiles.ROWS}"
    if not 0 < n <= MAX_COLUMNS or n % _MULTIPLE:
        return f"n={n} is not a positive multiple of {_MULTIPLE} up to {MAX_COLUMNS}"
    if norm == "block":
        if n % NORM_BLOCK or n > _WIDE_BLOCK:
            return f"n={n} is not a multiple of {NORM_BLOCK} up to {_WIDE_BLOCK}"
    elif n > _WIDE and n % (_FOLD * _MULTIPLE):
        return f"n={n} is not a multiple of {_FOLD * _MULTIPLE}, as above {_WIDE}"
    dtype = jnp.dtype(xhat_dtype)
    if dtype not in (jnp.dtype(E4M3), jnp.dtype(jnp.bfloat16)):
        return f"xhat is {dtype.name}, neither bfloat16 nor E4M3"
    if norm == "none" and dtype == E4M3:
        return "without a norm xhat is in bfloat16"
    if settings is None:
        return None
    if settings.folded:
        if settings.rows > 1 or norm == "block":
            return f"{settings} is for single rows without blocks"
        if n % (_FOLD * _MULTIPLE):
            return f"n={n} is not a multiple of {_FOLD * _MULTIPLE} for {settings}"
    if m % settings.tile_rows:
        return f"m={m} is not a multiple of the {settings.tile_rows} rows of a tile"
    ring = settings.stages * settings.tile_rows * n * (2 + dtype.itemsize)
    sums = 4 * n * _FOLD // settings.fold if norm in ("layer", "rms") else 0
    smem = settings.warpgroups * (ring + sums)
    if smem + _SMEM_RESERVE > tiles.SMEM_BYTES:
        return f"n={n} takes {smem} bytes of shared memory for {settings}"
    return None


def default_settings(
    m: int, n: int, *, norm: NormName, xhat_dtype: DTypeLike
) -> Settings:
    """Returns the settings used where none are given."""
    del m
    folds = norm != "block" and n % (_FOLD * _MULTIPLE) == 0
    if n >= 1024 and folds:
        return Settings(stages=3, warpgroups=4 if n <= 2048 else 2, folded=True)
    if n > 512:
        return Settings(stages=2, warpgroups=2, resident=False)
    return Settings(rows=max(1, 512 // n), stages=3)


def search_space(
    m: int, n: int, *, norm: NormName, xhat_dtype: DTypeLike
) -> list[Settings]:
    """Returns the settings worth measuring for a shape, the default one first."""
    space = [default_settings(m, n, norm=norm, xhat_dtype=xhat_dtype)]
    parameters = 2 * (norm in ("layer", "rms"))
    options = ((False, True), (1, 2, 4), (3, 5), (2, 4, 6), (True, False))
    for folded, rows, stages, warpgroups, resident in itertools.product(*options):
        settings = Settings(rows, stages, warpgroups, folded, resident)
        columns = n // (32 * settings.fold)  # a lane's
        # A lane has 512 registers if there is one warpgroup. It holds g, xhat and sums.
        registers = columns * (2 * rows + parameters * (1 + resident)) + 32
        fits = 512 // (warpgroups + 3) <= registers <= 512 // warpgroups
        fits = fits and (resident or parameters > 0)
        refused = why_not(m, n, norm=norm, xhat_dtype=xhat_dtype, settings=settings)
        if fits and refused is None:
            space.append(settings)
    return list(dict.fromkeys(space))


def norm_backward(
    dy: Float[Array, "m n"],
    xhat: Float[Array, "m n"],
    rstd: Float[Array, "..."] | None,
    *,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName,
    quantize: bool,
    settings: Settings | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> NormGradients:
    """Returns the gradients of `activation(gamma norm(z) + beta)`.

    Deterministic: the same operands give the same bits.

    Args:
        dy: bfloat16.
        xhat: normalized rows, bfloat16, or E4M3 with the scale `XHAT_SCALE_INV`;
            without a norm what entered the activation, bfloat16.
        rstd: float32 reciprocal deviations, `[m]`, or `[n / 256, m]` for block norms
            wider than a block; None without a norm.
        gamma: float32 factor after a "layer" or "rms" norm.
        beta: float32 summand after it.
        norm: one of `loka_jax.normed`.
        activation: what followed the norm.
        quantize: write dz in E4M3 too. A row of zeros has a positive scale; a row with
            a NaN or an infinity is NaN throughout.
        settings: the layout of the launch; chosen by shape if None.
        interpret: how to interpret the kernel on a CPU; run on the GPU if None.

    Raises:
        ValueError: with the reason if these shapes or settings are not served.
    """
    m, n = dy.shape
    if settings is None:
        settings = default_settings(m, n, norm=norm, xhat_dtype=xhat.dtype)
    reason = why_not(m, n, norm=norm, xhat_dtype=xhat.dtype, settings=settings)
    if reason is not None:
        raise ValueError(f"norm_backward: {reason}.")
    assert norm in ("layer", "rms") or (gamma is None and beta is None)
    assert (rstd is None) == (norm == "none")
    if rstd is not None:
        rstd = rstd.reshape(-1, m)
    inputs = _Inputs(dy, xhat, rstd, gamma, beta)
    given = _Inputs(*(x is not None for x in inputs))
    kernel = _Kernel(m, n, xhat.dtype, norm, activation, quantize, given, settings)
    results = kernel.launch(inputs, interpret)
    dz_fp8 = None
    if quantize:
        dz_fp8 = Fp8Array(results.dz_fp8.reshape(m, n), results.dz_scale[:, None])
    sums = {}
    if kernel.summed:
        totals = jnp.sum(results.sums, axis=0).reshape(-1, n)
        sums = dict(zip(kernel.summed, totals, strict=True))
    if "gamma" in sums:
        sums["gamma"] = sums["gamma"] * kernel.xhat_scale
    dz = results.dz.reshape(m, n)
    return NormGradients(dz, dz_fp8, sums.get("gamma"), sums.get("beta"))


class _Inputs(NamedTuple):
    """The kernel's operands, or references to them; None for what is absent."""

    dy: Any
    xhat: Any
    rstd: Any
    gamma: Any
    beta: Any


class _Results(NamedTuple):
    """What the kernel writes, or references to it; None for what it does not."""

    dz: Any
    dz_fp8: Any
    dz_scale: Any
    sums: Any


class _Place(NamedTuple):
    """Where a tile lies.

    Attributes:
        matrix: rows of the folded matrices.
        vector: entries of what has one value a row.
        exchange: shared memory for sums of folded rows, (3, 4) float32.
    """

    matrix: Any
    vector: Any
    exchange: Any


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The static side of a launch."""

    m: int
    n: int
    xhat_dtype: DTypeLike
    norm: NormName
    activation: ActivationName
    quantize: bool
    given: _Inputs
    settings: Settings

    @property
    def fold(self) -> int:
        return self.settings.fold

    @property
    def rows(self) -> int:
        """Rows of a folded tile."""
        return self.settings.tile_rows * self.fold

    @property
    def columns(self) -> int:
        """Columns of a folded tile."""
        return self.n // self.fold

    @property
    def width(self) -> int:
        """Columns of a piece."""
        return math.gcd(self.columns, tiles.TMA_SIDE)

    @property
    def pieces(self) -> list:
        """Columns of each piece."""
        return [pl.ds(i, self.width) for i in range(0, self.columns, self.width)]

    @property
    def summed(self) -> list[str]:
        """Parameters whose gradients are summed over the rows."""
        return [name for name in ("gamma", "beta") if getattr(self.given, name)]

    @property
    def xhat_scale(self) -> float:
        return XHAT_SCALE_INV if jnp.dtype(self.xhat_dtype) == E4M3 else 1.0

    @property
    def gamma_scale(self) -> float:
        """What gamma is multiplied by once, to spare products for every element."""
        return self.xhat_scale * input_scale(self.activation)

    @property
    def ctas(self) -> int:
        tile_rows = self.settings.tile_rows * self.settings.warpgroups
        return min(-(-self.m // tile_rows), tiles.SMS)

    @property
    def layout(self) -> Any:
        """Rows over 4 warps, columns over lanes."""
        vector = 8 if self.width % 256 == 0 else 4
        tiling = plgpu.Tiling(((_FOLD, 32 * vector), (vector,)))
        return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)

    def launch(self, inputs: _Inputs, interpret) -> _Results:
        results = self._results()
        folded = (self.fold, self.columns)
        if self.fold > 1:
            parameters = {k: getattr(inputs, k).reshape(folded) for k in self.summed}
            inputs = inputs._replace(**parameters)
        inputs = inputs._replace(
            dy=inputs.dy.reshape(-1, self.columns),
            xhat=inputs.xhat.reshape(-1, self.columns),
        )

        def body(*refs, **scratch):
            refs = iter(refs)
            operands = _Inputs(*(next(refs) if x else None for x in self.given))
            targets = _Results(*(r if r is None else next(refs) for r in results))
            self._body(operands, targets, **scratch)

        out = plgpu.kernel(
            body,
            out_type=[r for r in results if r is not None],
            scratch_types=self._scratch(),
            grid=(self.ctas,),
            grid_names=("cta",),
            num_threads=self.settings.warpgroups,
            thread_name="warpgroup",
            compiler_params=tiles.compiler_params(),
            interpret=interpret,
        )(*(x for x in inputs if x is not None))
        out = iter(out)
        return _Results(*(r if r is None else next(out) for r in results))

    def _results(self) -> _Results:
        shape = jax.ShapeDtypeStruct
        matrix = (self.m * self.fold, self.columns)
        sums = (self.ctas, len(self.summed), self.fold, self.columns)
        return _Results(
            dz=shape(matrix, jnp.bfloat16),
            dz_fp8=shape(matrix, E4M3) if self.quantize else None,
            dz_scale=shape((self.m,), jnp.float32) if self.quantize else None,
            sums=shape(sums, jnp.float32) if self.summed else None,
        )

    def _scratch(self) -> dict:
        stages, warpgroups = self.settings.stages, self.settings.warpgroups
        slots, pieces = stages * warpgroups, len(self.pieces)
        ring = (slots, pieces, self.rows, self.width)
        scratch = dict(
            dy_ring=plgpu.SMEM(ring, jnp.bfloat16),
            xhat_ring=plgpu.SMEM(ring, self.xhat_dtype),
            full=plgpu.Barrier(num_barriers=slots, num_arrivals=2 * pieces),
        )
        if self.fold > 1:
            exchange = (warpgroups, 2, _EXCHANGES, self.fold)
            scratch["exchange"] = plgpu.SMEM(exchange, jnp.float32)
        if self.summed:
            area = (warpgroups, _FOLD, self.columns)
            scratch["area"] = plgpu.SMEM(area, jnp.float32)
            scratch["meeting"] = plgpu.Barrier(num_arrivals=warpgroups)
        return scratch

    def _body(
        self,
        inputs: _Inputs,
        results: _Results,
        dy_ring: Any,
        xhat_ring: Any,
        full: Any,
        exchange: Any = None,
        area: Any = None,
        meeting: Any = None,
    ):
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
        # Tiles worker, worker + workers, ... are this warpgroup's.
        worker = warpgroup * self.ctas + cta
        workers = self.settings.warpgroups * self.ctas
        tile_rows, stages = self.settings.tile_rows, self.settings.stages
        steps = lax.div(self.m // tile_rows - worker + workers - 1, workers)
        column = self._column_loader(inputs)
        rings = ((inputs.dy, dy_ring), (inputs.xhat, xhat_ring))

        def place_of(step):
            tile = worker + step * workers
            matrix = pl.ds(tile * self.rows, self.rows)
            if exchange is None:
                return _Place(matrix, matrix, None)
            return _Place(matrix, tile, exchange.at[warpgroup, lax.rem(step, 2)])

        def slot_of(step):
            return warpgroup * stages + lax.rem(step, stages)

        def fetch(step):
            slot = slot_of(step)
            rows = place_of(step).matrix
            for i, columns in enumerate(self.pieces):
                for source, ring in rings:
                    piece = source.at[rows, columns]
                    plgpu.copy_gmem_to_smem(piece, ring.at[slot, i], full.at[slot])

        for step in range(stages):

            @pl.when(step < steps)
            def _(step=step):
                fetch(jnp.int32(step))

        def advance(step, sums):
            place = place_of(step)
            rstd = self._row_values(inputs.rstd, place)  # on its way during the wait
            slot = slot_of(step)
            plgpu.barrier_wait(full.at[slot])
            count = len(self.pieces)
            dy = [self._load(dy_ring.at[slot, i]) for i in range(count)]
            xhat = [self._load(xhat_ring.at[slot, i]) for i in range(count)]
            plgpu.commit_smem()  # all threads have read the slot

            @pl.when(step + stages < steps)
            def _():
                fetch(step + stages)

            g, on_xhat, sums = self._activation_backward(dy, xhat, column, sums)
            dz = self._norm_backward(g, on_xhat, xhat, rstd, place)
            self._store(dz, results, place)
            return sums

        zeros = jnp.zeros((_FOLD, self.width), jnp.float32)
        zeros = plgpu.layout_cast(zeros, self.layout)
        # Column sums by parameter and piece; a row for each warp.
        sums = [[zeros] * len(self.pieces) for _ in self.summed]
        sums = lax.fori_loop(0, steps, advance, sums)
        for i, parts in enumerate(sums):
            self._sum_over_warps(parts, area, meeting, results.sums.at[cta, i], i)

    def _load(self, ref, layout=None):
        return plgpu.load(ref, layout=layout or self.layout, optimized=False)

    def _row_values(self, ref, place: _Place):
        """Returns for each block the values of a tile's rows: one for a folded row."""
        if ref is None:
            return []
        blocks = range(ref.shape[0])
        if self.fold > 1:
            return [ref[i, place.vector] for i in blocks]
        layout = self.layout.reduce(1)
        return [self._load(ref.at[i, place.vector], layout) for i in blocks]

    def _column_loader(self, inputs: _Inputs):
        """Returns a function from a name to that parameter of each piece.

        gamma and beta are made to give what the slope wants, of xhat as it is stored.
        """
        layout = self.layout if self.fold > 1 else self.layout.reduce(0)

        def load(name):
            ref = getattr(inputs, name)
            if ref is None:
                return [None] * len(self.pieces)
            at = [(slice(None), c) if self.fold > 1 else c for c in self.pieces]
            values = [self._load(ref.at[i], layout) for i in at]
            beta_scale = input_scale(self.activation)
            scale = self.gamma_scale if name == "gamma" else beta_scale
            return values if scale == 1.0 else [v * scale for v in values]

        if not self.settings.resident:
            return load
        return {name: load(name) for name in ("gamma", "beta")}.get

    def _activation_backward(self, dy, xhat, column, sums):
        """Returns g, g xhat and the column sums advanced, all in pieces.

        Up to constants: xhat as it is stored, and gamma as it was loaded.
        """
        g, on_xhat = [], []
        sums = [list(parts) for parts in sums]
        gammas, betas = column("gamma"), column("beta")
        for i, (gamma, beta) in enumerate(zip(gammas, betas, strict=True)):
            x = xhat[i].astype(jnp.float32)
            gamma = None if gamma is None else self._per_column(gamma)
            du = self._slope_times(dy[i].astype(jnp.float32), x, gamma, beta)
            for parts, name in zip(sums, self.summed, strict=True):
                parts[i] = parts[i] + self._sum_rows(du * x if name == "gamma" else du)
            g.append(du if gamma is None else du * gamma)
            on_xhat.append(g[-1] * x)
        return g, on_xhat, sums

    def _slope_times(self, dy, x, gamma, beta):
        """Returns dy times the activation's slope at gamma x + beta."""
        if self.activation == "none":
            return dy
        if gamma is not None:
            u = x * gamma
        else:
            u = x if self.gamma_scale == 1.0 else x * self.gamma_scale
        if beta is not None:
            u = u + self._per_column(beta)
        if self.activation == "relu":
            return jnp.where(u > 0.0, dy, 0.0)
        return dy * slope_scaled(self.activation, u)

    def _norm_backward(self, g, on_xhat, xhat, rstd, place: _Place):
        """Returns dz in pieces of float32."""
        if self.norm == "none":
            return g
        # Widened again rather than kept wide: it would take up to four times the
        # registers.
        xhat = [lax.optimization_barrier(x) for x in xhat]
        if self.norm == "block":
            assert self.width == NORM_BLOCK and self.fold == 1
            groups = [[i] for i in range(len(g))]
        else:
            groups = [list(range(len(g)))]
        per_g = 1 / self.gamma_scale if self.given.gamma else 1.0
        terms = [(on_xhat, self.xhat_scale**2)]
        if self.norm == "layer":
            terms.append((g, 1.0))
        dz = []
        for group, r in zip(groups, rstd, strict=True):
            r = r * per_g
            sums = [functools.reduce(jnp.add, [x[i] for i in group]) for x, _ in terms]
            sums = [jnp.sum(x, axis=1) for x in sums]
            sums = self._across_warps(sums, jnp.add, place, 0)
            count = len(group) * self.width * self.fold
            offsets = [
                self._per_row(r * x * (-factor / count))
                for x, (_, factor) in zip(sums, terms, strict=True)
            ]
            for i in group:
                offset = offsets[0] * xhat[i].astype(jnp.float32)
                if len(offsets) > 1:
                    offset = offset + offsets[1]
                dz.append(self._per_row(r) * g[i] + offset)
        return dz

    def _store(self, dz, results: _Results, place: _Place):
        for v, columns in zip(dz, self.pieces, strict=True):
            results.dz[place.matrix, columns] = v.astype(jnp.bfloat16)
        if not self.quantize:
            return
        largest = functools.reduce(jnp.maximum, [jnp.abs(v) for v in dz])
        amax = jnp.max(largest, axis=1)
        [amax] = self._across_warps([amax], jnp.maximum, place, 2)
        scale_inv = jnp.maximum(amax * (1 / fp8_max(E4M3)), _MIN_SCALE_INV)
        results.dz_scale[place.vector] = scale_inv
        scale = self._per_row(1.0 / scale_inv)
        for v, columns in zip(dz, self.pieces, strict=True):
            results.dz_fp8[place.matrix, columns] = (v * scale).astype(E4M3)

    def _across_warps(self, values, combine, place: _Place, first: int):
        """Returns the one value of a folded row for each of `values`.

        Args:
            values: of each row of the folded tile; returned if rows are in one warp.
            combine: of two values.
            place: has the shared memory.
            first: which of the exchanges of a tile the first of them is.
        """
        if self.fold == 1:
            return values
        for i, value in enumerate(values):
            place.exchange[first + i] = value
        plgpu.commit_smem()
        parts = [
            [place.exchange[first + i, j] for j in range(self.fold)]
            for i in range(len(values))
        ]
        return [functools.reduce(combine, part) for part in parts]

    def _sum_rows(self, v):
        """Returns a tile of one row a warp: the sums of the rows of each."""
        parts = [v[i : i + _FOLD] for i in range(0, self.rows, _FOLD)]
        return functools.reduce(jnp.add, parts)

    def _sum_over_warps(self, parts, area, meeting, target, i: int):
        """Writes the sums of a CTA's warps, of the i-th parameter.

        Args:
            parts: this warpgroup's sums in pieces, a row for each warp.
            area: shared memory for all of them.
            meeting: a barrier of all warpgroups.
            target: global memory, (fold, columns).
            i: another warpgroup works for each parameter.
        """
        warpgroup, warpgroups = lax.axis_index("warpgroup"), self.settings.warpgroups

        def meet():
            plgpu.barrier_arrive(meeting)
            plgpu.barrier_wait(meeting)

        if i > 0:
            meet()  # the area was read
        for part, columns in zip(parts, self.pieces, strict=True):
            area[warpgroup, :, columns] = part
        meet()
        layout = plgpu.Layout.WG_STRIDED((self.columns,), vec_size=1)

        @pl.when(warpgroup == i % warpgroups)
        def _():
            # Folded rows have other columns in each warp, else all have the same.
            for first in range(self.fold):
                rows = itertools.product(
                    range(warpgroups), range(first, _FOLD, self.fold)
                )
                values = [self._load(area.at[w, r], layout) for w, r in rows]
                target[first] = functools.reduce(jnp.add, values)

    def _per_row(self, values):
        if values.ndim == 0:
            return values
        return lax.broadcast_in_dim(values, (self.rows, self.width), (0,))

    def _per_column(self, values):
        if values.ndim == 2:
            return values
        return lax.broadcast_in_dim(values, (self.rows, self.width), (1,))
