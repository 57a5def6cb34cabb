"""Norm, activation and quantization of rows in one pass: the companion of XLA's GEMM.

    z' = z + bias        u = gamma norm(z') + beta        y = activation(u)

For sites too wide for the fused kernel (`dense_norm`): XLA multiplies and writes z
(M, N) in bfloat16, this kernel reads it once and writes what is wanted. Nothing but
memory bandwidth should limit it.

Rows lie in registers the way they lie in memory: 8 neighbouring columns a lane, and 8,
16 or 32 neighbouring lanes a row. So accesses are 16 bytes a lane without gaps, and the
sums of a row stay within a warp. Wide rows are folded: a quarter for each warp of a
warpgroup, seen as a row of its own until the sums are added.

Each warpgroup works for itself. It walks over row tiles, in pieces of at most 256
columns, that TMA brings to a ring of its own in shared memory, or that it loads from
global memory.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array, fp8_max
from loka_jax.normed import (
    NORM_BLOCK,
    XHAT_MAX_FEATURES,
    XHAT_SCALE_INV,
    ActivationName,
    Normed,
    NormName,
    Outputs,
)
from loka_jax.pallas import tiles
from loka_jax.pallas.activations import activate_scaled, input_scale

MAX_COLUMNS = 4096  # a row of more does not fit in the registers
_WIDE = 2048  # columns beyond which unfolded rows spill registers
_FOLD = 4  # warps of a warpgroup
_MULTIPLE = 128  # of columns, for lanes without gaps
_EXCHANGES = 3  # of sums between warps: mean, variance, largest magnitude
_SMEM_RESERVE = 1024  # for barriers
# As in `fp8.compute_scale_inv`: the least scale whose reciprocal is finite, and that is
# no denormal itself.
_MIN_SCALE_INV = 2 * float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a launch is laid out.

    Attributes:
        lanes: lanes that share a row: 8, 16, 32, or 128 (all warps of a warpgroup, for
            multiples of 512 columns, not for block norms).
        rows: rows of a tile that each lane has a part of.
        stages: tiles in the ring in shared memory; 0 loads from global memory.
        warpgroups: to a CTA, each with tiles and a ring of its own. The more there are
            the fewer registers the compiler gives each.
        ctas: CTAs for each SM, walking over the tiles; 0 for no walk, a tile for each
            warpgroup.
        resident: keep bias, gamma and beta in registers over all tiles of a CTA.
    """

    lanes: int = 32
    rows: int = 1
    stages: int = 3
    warpgroups: int = 4
    ctas: int = 1
    resident: bool = True

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return 128 // self.lanes * self.rows

    @property
    def fold(self) -> int:
        """Warps that share a row."""
        return max(1, self.lanes // 32)


def why_not(
    m: int, n: int, *, norm: NormName, settings: Settings | None = None
) -> str | None:
    """Returns why rows of this shape are not served, or None if they are."""
    if m == 0 or m % tiles.ROWS:
        return f"m={m} is not a positive multiple of {tiles.ROWS}"
    if not 0 < n <= MAX_COLUMNS or n % _MULTIPLE:
        return f"n={n} is not a positive multiple of {_MULTIPLE} up to {MAX_COLUMNS}"
    if n > _WIDE and n % (_FOLD * _MULTIPLE):
        return f"n={n} is not a multiple of {_FOLD * _MULTIPLE}, as above {_WIDE}"
    if norm == "block" and n % NORM_BLOCK:
        return f"n={n} is not a multiple of the norm's block, {NORM_BLOCK}"
    if settings is None:
        return None
    if settings.fold > 1:
        if settings.rows > 1 or norm == "block":
            return f"{settings} is for single rows without blocks"
        if n % (_FOLD * _MULTIPLE):
            return f"n={n} is not a multiple of {_FOLD * _MULTIPLE} for {settings}"
    if m % settings.tile_rows:
        return f"m={m} is not a multiple of the {settings.tile_rows} rows of a tile"
    ring = settings.stages * settings.tile_rows * n * 2
    smem = max(1, settings.ctas) * settings.warpgroups * ring
    if smem + _SMEM_RESERVE > tiles.SMEM_BYTES:
        return f"n={n} takes {smem} bytes of shared memory for {settings}"
    return None


def default_settings(
    m: int, n: int, *, norm: NormName, parameters: int = 2
) -> Settings:
    """Returns the settings used where none are given.

    Args:
        m: rows.
        n: columns.
        norm: as in `norm_quantize`.
        parameters: how many of bias, gamma and beta there are.
    """
    del m
    if n > 1024 and norm != "block" and n % (_FOLD * _MULTIPLE) == 0:
        lanes = 128
    else:
        lanes = {256: 8, 512: 16}.get(n, 32)
    # About 32 values a lane hide the latencies, and leave room for two parameters.
    rows = max(1, 1024 // n) if lanes == 32 else 1
    values = n // lanes * rows
    return Settings(
        lanes=lanes,
        rows=rows,
        warpgroups=4 if values <= 32 else 2,
        resident=parameters * (n // lanes) <= 64,
    )


def search_space(m: int, n: int, *, norm: NormName) -> list[Settings]:
    """Returns the settings worth measuring for a shape, the default one first."""
    space = [default_settings(m, n, norm=norm)]
    options = ((8, 16, 32, 128), (1, 2), (0, 3), (2, 4, 6), (True, False))
    for lanes, rows, stages, warpgroups, resident in itertools.product(*options):
        settings = Settings(lanes, rows, stages, warpgroups, 1, resident)
        # Each lane has 512 registers if there is one warpgroup. More warpgroups than
        # fit spill, fewer do not hide the latencies.
        values, parameters = n // lanes * rows, 2 * resident * (n // lanes)
        registers = values + parameters + 32
        fits = 512 // (warpgroups + 2) <= registers <= 512 // warpgroups
        fits = fits and values <= 128 // warpgroups
        if fits and why_not(m, n, norm=norm, settings=settings) is None:
            space.append(settings)
    return list(dict.fromkeys(space))


def norm_quantize(
    z: Float[Array, "m n"],
    *,
    scales: Sequence[Float[Array, "..."]] = (),
    bias: Float[Array, "n"] | None = None,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName,
    epsilon: float = 1e-6,
    want: Outputs,
    y_scale_inv: Float[Array, ""] | None = None,
    settings: Settings | None = None,
    interpret: Any = None,
) -> Normed:
    """Returns what `want` asks for of `activation(norm(scales z + bias))`.

    Args:
        z: bfloat16 rows.
        scales: float32 factors of z, each of shape `[]` or `[m, 1]`: those of an FP8
            product whose operands' scales were not applied yet.
        bias: float32, added before the norm.
        gamma: float32 factor after a "layer" or "rms" norm.
        beta: float32 summand after it.
        norm: "layer" and "rms" over all columns, "block" over blocks of 256, or "none".
        activation: applied last.
        epsilon: added to the variance or mean square.
        want: the outputs. A row of zeros has a positive scale; a row with a NaN or an
            infinity is NaN throughout.
        y_scale_inv: scale of the FP8 output if `want.y_fp8` is "tensor"; what it does
            not reach saturates.
        settings: the layout of the launch.
        interpret: `plgpu.InterpretGPUParams` to interpret the kernel on a CPU.

    The variance is taken of the differences from the mean, in float32.
    """
    m, n = z.shape
    if settings is None:
        parameters = sum(p is not None for p in (bias, gamma, beta))
        settings = default_settings(m, n, norm=norm, parameters=parameters)
    reason = why_not(m, n, norm=norm, settings=settings)
    if reason is not None:
        raise ValueError(f"norm_quantize: {reason}.")
    assert norm in ("layer", "rms") or (gamma is None and beta is None)
    assert (want.y_fp8 == "tensor") == (y_scale_inv is not None)
    kernel = _Kernel(m, n, norm, activation, epsilon, want, settings)
    y_scale = None if y_scale_inv is None else y_scale_inv.reshape(1)
    scalars = [s.reshape(1) for s in scales if s.size == 1]
    by_row = [s.reshape(m) for s in scales if s.size != 1]
    assert len(scalars) <= 2 and len(by_row) <= 1
    first, second, *_ = *scalars, None, None
    row_scale = by_row[0] if by_row else None
    inputs = _Inputs(z, first, second, row_scale, bias, gamma, beta, y_scale)
    results = kernel.launch(inputs, interpret)
    y_fp8 = None
    if results.y_fp8 is not None:
        scale_inv = results.y_scale[:, None] if y_scale_inv is None else y_scale_inv
        y_fp8 = Fp8Array(results.y_fp8.reshape(m, n), scale_inv)
    y, xhat = (x if x is None else x.reshape(m, n) for x in (results.y, results.xhat))
    return Normed(y, y_fp8, xhat, results.rstd, results.y_amax)


class _Inputs(NamedTuple):
    """The kernel's operands, or references to them; None for what is absent."""

    z: Any
    scale: Any
    other_scale: Any
    row_scale: Any
    bias: Any
    gamma: Any
    beta: Any
    y_scale: Any


class _Results(NamedTuple):
    """What the kernel writes, or references to it; None for what it does not."""

    y: Any
    y_fp8: Any
    y_scale: Any
    y_amax: Any
    xhat: Any
    rstd: Any


class _Place(NamedTuple):
    """Where a tile's results go.

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
    norm: NormName
    activation: ActivationName
    epsilon: float
    want: Outputs
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
    def ctas(self) -> int:
        tile_rows = self.settings.tile_rows * self.settings.warpgroups
        needed = -(-self.m // tile_rows)
        most = tiles.SMS * self.settings.ctas
        return min(needed, most) if most else needed

    @property
    def layout(self) -> Any:
        """Rows over 4 warps and over groups of lanes, columns over lanes."""
        lanes = min(32, self.settings.lanes)
        groups = 32 // lanes
        vector = 8 if self.width % (8 * lanes) == 0 else 4
        width = lanes * vector
        if groups == 1:
            tiling = plgpu.Tiling(((4, width), (vector,)))
            return plgpu.Layout.TILED(tiling, (-3,), (-2,), -1)
        tiling = plgpu.Tiling(((4 * groups, width), (groups, width), (vector,)))
        return plgpu.Layout.TILED(tiling, (-5,), (-3, -2), -1)

    def launch(self, inputs: _Inputs, interpret) -> _Results:
        given = [x is not None for x in inputs]
        results = self._results()
        stages, warpgroups = self.settings.stages, self.settings.warpgroups
        scratch = {}
        if stages:
            slots, pieces = stages * warpgroups, len(self.pieces)
            ring = (slots, pieces, self.rows, self.width)
            scratch["ring"] = plgpu.SMEM(ring, jnp.bfloat16)
            scratch["full"] = plgpu.Barrier(num_barriers=slots, num_arrivals=pieces)
        if self.fold > 1:
            exchange = (warpgroups, 2, _EXCHANGES, self.fold)
            scratch["exchange"] = plgpu.SMEM(exchange, jnp.float32)
            folded = (self.fold, self.columns)
            parameters = {k: getattr(inputs, k) for k in ("bias", "gamma", "beta")}
            parameters = {
                k: x.reshape(folded) for k, x in parameters.items() if x is not None
            }
            inputs = inputs._replace(**parameters)
        inputs = inputs._replace(z=inputs.z.reshape(-1, self.columns))

        def body(*refs, **scratch):
            refs = iter(refs)
            operands = _Inputs(*(next(refs) if x else None for x in given))
            targets = _Results(*(r if r is None else next(refs) for r in results))
            self._body(operands, targets, **scratch)

        out = plgpu.kernel(
            body,
            out_type=[r for r in results if r is not None],
            scratch_types=scratch,
            grid=(self.ctas,),
            grid_names=("cta",),
            num_threads=warpgroups,
            thread_name="warpgroup",
            compiler_params=tiles.compiler_params(),
            interpret=interpret,
        )(*(x for x in inputs if x is not None))
        out = iter(out)
        return _Results(*(r if r is None else next(out) for r in results))

    def _results(self) -> _Results:
        want = self.want
        shape = jax.ShapeDtypeStruct
        matrix = (self.m * self.fold, self.columns)
        row = shape((self.m,), jnp.float32)
        rstd = row
        if self.norm == "block" and len(self.pieces) > 1:
            rstd = shape((len(self.pieces), self.m), jnp.float32)
        return _Results(
            y=shape(matrix, jnp.bfloat16) if want.y else None,
            y_fp8=shape(matrix, E4M3) if want.y_fp8 else None,
            y_scale=row if want.y_fp8 == "row" else None,
            y_amax=row if want.y_amax else None,
            xhat=shape(matrix, want.xhat) if want.xhat is not None else None,
            rstd=rstd if want.rstd else None,
        )

    def _body(
        self,
        inputs: _Inputs,
        results: _Results,
        ring: Any = None,
        full: Any = None,
        exchange: Any = None,
    ):
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
        # Tiles worker, worker + workers, ... are this warpgroup's.
        worker = warpgroup * self.ctas + cta
        workers = self.settings.warpgroups * self.ctas
        tile_rows, stages = self.settings.tile_rows, self.settings.stages
        steps = lax.div(self.m // tile_rows - worker + workers - 1, workers)
        column = self._column_loader(inputs)
        y_scale = None if inputs.y_scale is None else 1.0 / inputs.y_scale[0]
        scales = (inputs.scale, inputs.other_scale)
        scales = [scale[0] for scale in scales if scale is not None]

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
                source = inputs.z.at[rows, columns]
                plgpu.copy_gmem_to_smem(source, ring.at[slot, i], full.at[slot])

        for step in range(stages):

            @pl.when(step < steps)
            def _(step=step):
                fetch(jnp.int32(step))

        @pl.loop(0, steps)
        def _(step):
            place = place_of(step)
            if stages:
                slot = slot_of(step)
                plgpu.barrier_wait(full.at[slot])
                tile = [self._load(ring.at[slot, i]) for i in range(len(self.pieces))]
                plgpu.commit_smem()  # all threads have read the slot

                @pl.when(step + stages < steps)
                def _():
                    fetch(step + stages)
            else:
                rows = place.matrix
                tile = [self._load(inputs.z.at[rows, c]) for c in self.pieces]
            factors = list(scales)
            if inputs.row_scale is not None:
                factors.append(self._row_values(inputs.row_scale, place))
            tile = self._scaled([v.astype(jnp.float32) for v in tile], factors)
            self._tile(tile, column, y_scale, results, place)

    def _load(self, ref, layout=None):
        return plgpu.load(ref, layout=layout or self.layout, optimized=False)

    def _row_values(self, ref, place: _Place):
        """Returns the values of a tile's rows: one number for a folded row."""
        if self.fold > 1:
            return ref[place.vector]
        return self._load(ref.at[place.vector], self.layout.reduce(1))

    def _scaled(self, pieces, factors):
        if not factors:
            return pieces
        factor = self._per_row(functools.reduce(jnp.multiply, factors))
        return [v * factor for v in pieces]

    def _column_loader(self, inputs: _Inputs):
        """Returns a function from a name to that parameter of each piece.

        gamma and beta are made to give what the activation wants.
        """
        layout = self.layout if self.fold > 1 else self.layout.reduce(0)

        def load(name):
            ref = getattr(inputs, name)
            if ref is None:
                return [None] * len(self.pieces)
            scale = 1.0 if name == "bias" else input_scale(self.activation)
            at = [(slice(None), c) if self.fold > 1 else c for c in self.pieces]
            values = [self._load(ref.at[i], layout) for i in at]
            return values if scale == 1.0 else [v * scale for v in values]

        if not self.settings.resident:
            return load
        return {name: load(name) for name in ("bias", "gamma", "beta")}.get

    def _tile(self, tile, column, y_scale, results: _Results, place: _Place):
        """Normalizes, activates and stores a tile, given in pieces of float32."""
        xhat = list(tile)
        for i, bias in enumerate(column("bias")):
            if bias is not None:
                xhat[i] = xhat[i] + self._per_column(bias)
        if self.norm == "block":
            assert self.width == NORM_BLOCK
            for i, v in enumerate(xhat):
                [xhat[i]], rstd = self._normalize([v], place)
                if results.rstd is not None:
                    at = (i, place.vector) if len(xhat) > 1 else place.vector
                    results.rstd[at] = rstd
        elif self.norm != "none":
            xhat, rstd = self._normalize(xhat, place)
            if results.rstd is not None:
                results.rstd[place.vector] = rstd
        if results.xhat is not None:
            for v, columns in zip(xhat, self.pieces, strict=True):
                results.xhat[place.matrix, columns] = self._stored_xhat(v)
        affine = zip(xhat, column("gamma"), column("beta"), strict=True)
        y = [self._activate(*parts) for parts in affine]
        if results.y is not None:
            for v, columns in zip(y, self.pieces, strict=True):
                results.y[place.matrix, columns] = v.astype(jnp.bfloat16)
        if results.y_amax is not None or results.y_scale is not None:
            largest = functools.reduce(jnp.maximum, [jnp.abs(v) for v in y])
            amax = self._across_warps(jnp.max(largest, axis=1), jnp.maximum, place, 2)
            if results.y_amax is not None:
                results.y_amax[place.vector] = amax
        if results.y_scale is not None:
            scale_inv = jnp.maximum(amax * (1 / fp8_max(E4M3)), _MIN_SCALE_INV)
            results.y_scale[place.vector] = scale_inv
            y_scale = self._per_row(1.0 / scale_inv)
        if results.y_fp8 is not None:
            for v, columns in zip(y, self.pieces, strict=True):
                v = v * y_scale
                v = _clip(v) if results.y_scale is None else v
                results.y_fp8[place.matrix, columns] = v.astype(E4M3)

    def _normalize(self, pieces, place):
        """Returns normalized pieces and the reciprocal deviations of their rows."""

        def mean(pieces, i):
            total = jnp.sum(functools.reduce(jnp.add, pieces), axis=1)
            total = self._across_warps(total, jnp.add, place, i)
            return total * (1 / (len(pieces) * self.width * self.fold))

        if self.norm == "layer":
            shift = self._per_row(mean(pieces, 0))
            pieces = [v - shift for v in pieces]
        rstd = lax.rsqrt(mean([v * v for v in pieces], 1) + self.epsilon)
        return [v * self._per_row(rstd) for v in pieces], rstd

    def _activate(self, v, gamma, beta):
        """Returns the activations of a normalized piece."""
        if gamma is not None:
            v = v * self._per_column(gamma)
        elif input_scale(self.activation) != 1.0:
            v = v * input_scale(self.activation)
        if beta is not None:
            v = v + self._per_column(beta)
        return activate_scaled(self.activation, v)

    def _across_warps(self, values, combine, place, i):
        """Returns the one value of a folded row, or `values` of rows in one warp.

        Args:
            values: one for each row of the folded tile.
            combine: of two values.
            place: has the shared memory.
            i: which of the exchanges of a tile this is.
        """
        if self.fold == 1:
            return values
        place.exchange[i] = values
        plgpu.commit_smem()
        parts = [place.exchange[i, j] for j in range(self.fold)]
        return functools.reduce(combine, parts)

    def _stored_xhat(self, v):
        """Returns normalized rows the way they are stored."""
        if self.want.xhat != E4M3:
            return v.astype(self.want.xhat)
        v = v * (1 / XHAT_SCALE_INV)
        features = NORM_BLOCK if self.norm == "block" else self.n
        return (v if features <= XHAT_MAX_FEATURES else _clip(v)).astype(E4M3)

    def _per_row(self, values):
        if values.ndim == 0:
            return values
        return lax.broadcast_in_dim(values, (self.rows, self.width), (0,))

    def _per_column(self, values):
        if values.ndim == 2:
            return values
        return lax.broadcast_in_dim(values, (self.rows, self.width), (1,))


def _clip(v):
    limit = fp8_max(E4M3)
    return jnp.minimum(jnp.maximum(v, -limit), limit)
