"""Backward pass of activation and norm in one pass over rows, before GEMMs by XLA.

    du = dy activation'(u)    u = gamma xhat + beta    g = gamma du
    dz = rstd (g - mean(g) - xhat mean(g xhat))
    dgamma = sum over rows of du xhat    dbeta = sum over rows of du

RMS and block norms drop `mean(g)`; without a norm `dz = du`, and `dbias`, the sum over
rows of dz, is taken here too. dz is written in bfloat16,
and on request in FP8 too, with one scale per row or under one scale passed in. The
kernel is limited by memory bandwidth alone.

Rows lie in registers as in `rows`, each in one warp or folded over all four, as
`column_sums` requires.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    NO_VECTORS,
    NORM_BLOCK,
    Epilogue,
    NormGradients,
    NormName,
    NormResiduals,
    NormVectors,
    norm_features,
    xhat_scale_inv,
)
from loka_jax.pallas import column_sums, rows, tiles
from loka_jax.pallas.activations import input_scale, slope_scaled
from loka_jax.pallas.row_tiles import (
    Tile,
    TilePipeline,
    column_loader,
    opaque,
    row_scale_inv,
    saturate,
)
from loka_jax.pallas.rows import RowLayout, TuningConfig

# Columns; the column sums of longer unfolded rows spill registers.
_MAX_UNFOLDED = 1024
_MAX_BLOCK_COLUMNS = 2048  # the same for block norms, which have no column sums


def why_not(
    m: int,
    n: int,
    *,
    norm: NormName,
    xhat_dtype: DTypeLike,
    config: TuningConfig | None = None,
) -> str | None:
    """Returns why rows of this shape are not served, or None if they are."""
    unfolded = rows.MAX_COLUMNS if norm == "block" else _MAX_UNFOLDED
    reason = rows.why_not(m, n, max_unfolded=unfolded)
    if reason is not None:
        return reason
    if norm == "block" and (n % norm_features(norm, n) or n > _MAX_BLOCK_COLUMNS):
        return f"n={n} is not a multiple of {NORM_BLOCK} up to {_MAX_BLOCK_COLUMNS}"
    dtype = jnp.dtype(xhat_dtype)
    if dtype not in (jnp.dtype(E4M3), jnp.dtype(jnp.bfloat16)):
        return f"xhat is {dtype.name}, neither bfloat16 nor E4M3"
    if norm == "none" and dtype == E4M3:
        return "without a norm xhat is in bfloat16"
    if config is None:
        return None
    if config.lanes not in (32, 128):
        return f"lanes={config.lanes} leave sums of columns in several lanes"
    layout = RowLayout(m, n, config)
    sums = 0 if norm == "block" else column_sums.area_bytes(layout)
    return layout.why_not(norm, element_bytes=2 + dtype.itemsize, extra_bytes=sums)


def default_config(n: int, *, norm: NormName) -> TuningConfig:
    """Returns the default config for rows of n columns."""
    if n >= 1024 and norm != "block" and n % rows.FOLD_MULTIPLE == 0:
        return TuningConfig(lanes=128, warpgroups=4 if n <= 2048 else 2)
    if n > 512:
        return TuningConfig(pipeline_stages=2, warpgroups=2, keep_vectors=False)
    return TuningConfig(rows=max(1, 512 // n))


def norm_backward(
    dy: Float[Array, "m n"],
    residuals: NormResiduals,
    vectors: NormVectors = NO_VECTORS,
    *,
    epilogue: Epilogue,
    dz_fp8: DTypeLike | None = None,
    dz_scale_inv: Float[Array, ""] | None = None,
    config: TuningConfig | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> NormGradients:
    """Returns the gradients of `activation(gamma norm(z) + beta)`.

    Deterministic: the same operands give the same bits.

    Args:
        residuals: of the forward pass; xhat in bfloat16, or after a norm in E4M3.
        vectors: gamma and beta of a "layer" or "rms" norm; without a norm the bias, if
            its gradient is wanted.
        epilogue: norm and activation of the forward pass; epsilon is not used.
        dz_scale_inv: its scale, beyond which values saturate. None for one scale per
            row: a row of zeros has a positive scale, a row with a NaN or an infinity is
            NaN throughout.

    Raises:
        ValueError: if this shape or this config is not served (see `why_not`).
    """
    (m, n), norm, (xhat, rstd) = dy.shape, epilogue.norm, residuals
    bias, gamma, beta = vectors
    config = config or default_config(n, norm=norm)
    reason = why_not(m, n, norm=norm, xhat_dtype=xhat.dtype, config=config)
    if reason is not None:
        raise ValueError(f"norm_backward: {reason}.")
    assert norm in ("layer", "rms") or (gamma is None and beta is None)
    assert norm == "none" or bias is None
    assert (rstd is None) == (norm == "none")
    has_scale = dz_scale_inv is not None
    assert dz_fp8 is not None or not has_scale
    layout = RowLayout(m, n, config)
    inputs = _Inputs(
        dy=layout.fold_matrix(dy),
        xhat=layout.fold_matrix(xhat),
        rstd=None if rstd is None else rstd.reshape(-1, m),
        gamma=layout.fold_vector(gamma),
        beta=layout.fold_vector(beta),
        dz_scale_inv=dz_scale_inv.reshape(1) if has_scale else None,
    )
    candidates = dict(gamma=gamma, beta=beta, bias=bias)
    summed = tuple(name for name, x in candidates.items() if x is not None)
    kernel = _Kernel(layout, xhat.dtype, epilogue, dz_fp8, has_scale, summed)
    return kernel.gradients(kernel.launch(inputs, interpret), dz_scale_inv)


class _Inputs(NamedTuple):
    """The kernel's operands, or references to them; None where absent."""

    dy: Any
    xhat: Any
    rstd: Any
    gamma: Any
    beta: Any
    dz_scale_inv: Any


class _Results(NamedTuple):
    """The kernel's outputs, or references to them; None where not requested."""

    dz: Any
    dz_fp8: Any
    dz_scale_inv: Any
    dz_amax: Any
    sums: Any


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The static side of a launch.

    Attributes:
        dz_fp8: FP8 format of a second dz, or None.
        has_scale: the scale of that dz is passed in, rather than one per row.
        summed: the vectors whose gradients are summed over the rows.
    """

    layout: RowLayout
    xhat_dtype: DTypeLike
    epilogue: Epilogue
    dz_fp8: DTypeLike | None
    has_scale: bool
    summed: tuple[str, ...]

    @property
    def xhat_scale(self) -> float:
        """The factor of xhat as it is stored."""
        is_fp8 = jnp.dtype(self.xhat_dtype) == E4M3
        return xhat_scale_inv(self.epilogue.norm, self.layout.n) if is_fp8 else 1.0

    @property
    def gamma_scale(self) -> float:
        """The factor of gamma, applied once rather than to every element."""
        return self.xhat_scale * input_scale(self.epilogue.activation)

    @property
    def scales_rows(self) -> bool:
        """True if the FP8 dz has one scale per row."""
        return self.dz_fp8 is not None and not self.has_scale

    @tiles.lowered_once
    def launch(self, inputs: _Inputs, interpret) -> _Results:
        layout = self.layout
        scratch = layout.scratch([jnp.bfloat16, self.xhat_dtype])
        if self.summed:
            scratch["sums"] = column_sums.scratch(layout)
        return layout.launch(self._body, inputs, self._results(), scratch, interpret)

    def _results(self) -> _Results:
        layout, count = self.layout, len(self.summed)
        row = jax.ShapeDtypeStruct((layout.m,), jnp.float32)
        part = jax.ShapeDtypeStruct((layout.warps,), jnp.float32)
        return _Results(
            dz=layout.matrix_type(jnp.bfloat16),
            dz_fp8=None if self.dz_fp8 is None else layout.matrix_type(self.dz_fp8),
            dz_scale_inv=row if self.scales_rows else None,
            dz_amax=part if self.has_scale else None,
            sums=column_sums.result_type(layout, count) if count else None,
        )

    def gradients(self, results: _Results, scale_inv) -> NormGradients:
        """Returns the unfolded matrices, and the sums over all CTAs."""
        m, n = self.layout.m, self.layout.n
        dz_fp8 = None
        if self.dz_fp8 is not None:
            if scale_inv is None:
                scale_inv = results.dz_scale_inv[:, None]
            dz_fp8 = Fp8Array(results.dz_fp8.reshape(m, n), scale_inv)
        sums = {}
        if self.summed:
            totals = jnp.sum(results.sums, axis=0).reshape(-1, n)
            sums = dict(zip(self.summed, totals, strict=True))
        if "gamma" in sums:
            sums["gamma"] = sums["gamma"] * self.xhat_scale
        dz = results.dz.reshape(m, n)
        by_name = (sums.get(name) for name in ("gamma", "beta", "bias"))
        return NormGradients(dz, dz_fp8, results.dz_amax, *by_name)

    def _body(self, inputs: _Inputs, results: _Results, sums: Any = None, **scratch):
        layout = self.layout
        pipeline = TilePipeline(layout, [inputs.dy, inputs.xhat], **scratch)
        column = column_loader(
            layout,
            gamma=(inputs.gamma, self.gamma_scale),
            beta=(inputs.beta, input_scale(self.epilogue.activation)),
        )
        pipeline.start()
        scale = None
        if self.has_scale:
            scale = 1.0 / inputs.dz_scale_inv[0]
        blocks = 0 if inputs.rstd is None else inputs.rstd.shape[0]

        def advance(step, carry):
            totals, largest = carry
            tile = pipeline.tile(step)
            # Loaded while the tile is waited for.
            rstd = [tile.load_row_values(inputs.rstd, i) for i in range(blocks)]
            dy, xhat = pipeline.load(tile)
            g, on_xhat, totals = self._activation_backward(
                dy, xhat, column, totals, tile
            )
            dz = self._norm_backward(g, on_xhat, xhat, rstd, tile)
            self._store(dz, results, tile, scale)
            return totals, [column_sums.largest(v, dz) for v in largest]

        totals = [column_sums.zeros(layout) for _ in self.summed]
        largest = [column_sums.zeros(layout)[0]] if self.has_scale else []
        totals, largest = lax.fori_loop(0, pipeline.steps, advance, (totals, largest))
        for value in largest:
            results.dz_amax[pipeline.warp_values] = jnp.max(value, axis=1)
        if self.summed:
            column_sums.write(layout, totals, results.sums, **sums)

    def _activation_backward(self, dy, xhat, column, totals, tile: Tile):
        """Returns g, g xhat and the new totals of the columns, all in subtiles.

        Up to constants: xhat as it is stored, and gamma as it was loaded.
        """
        g, on_xhat = [], []
        totals = [list(subtiles) for subtiles in totals]
        gammas, betas = column("gamma"), column("beta")
        for i, (gamma, beta) in enumerate(zip(gammas, betas, strict=True)):
            x = xhat[i].astype(jnp.float32)
            gamma = None if gamma is None else tile.per_column(gamma)
            du = self._slope_times(dy[i].astype(jnp.float32), x, gamma, beta, tile)
            for total, name in zip(totals, self.summed, strict=True):
                term = du * x if name == "gamma" else du
                term = tile.without_repeated(term)
                total[i] = total[i] + column_sums.sum_rows(term)
            g.append(du if gamma is None else du * gamma)
            on_xhat.append(g[-1] * x)
        return g, on_xhat, totals

    def _slope_times(self, dy, x, gamma, beta, tile: Tile):
        """Returns dy times the activation's slope at gamma x + beta."""
        if self.epilogue.activation == "none":
            return dy
        if gamma is not None:
            u = x * gamma
        else:
            u = x if self.gamma_scale == 1.0 else x * self.gamma_scale
        if beta is not None:
            u = u + tile.per_column(beta)
        if self.epilogue.activation == "relu":
            return jnp.where(u > 0.0, dy, 0.0)
        return dy * slope_scaled(self.epilogue.activation, u)

    def _norm_backward(self, g, on_xhat, xhat, rstd, tile: Tile):
        """Returns dz in subtiles of float32."""
        if self.epilogue.norm == "none":
            return g
        # Converted to float32 a second time rather than kept in float32, which would
        # take up to four times the registers.
        xhat = [opaque(x) for x in xhat]
        size = len(g) // len(rstd)  # a block is a subtile
        count = size * self.layout.width * self.layout.fold
        # The terms averaged over a row, with their factors beside those in g.
        terms = [(on_xhat, self.xhat_scale**2)]
        if self.epilogue.norm == "layer":
            terms.append((g, 1.0))
        dz = []
        for first, r in zip(range(0, len(g), size), rstd, strict=True):
            group = slice(first, first + size)
            r = r * (1 / self.gamma_scale if "gamma" in self.summed else 1.0)
            sums = tile.sums([subtiles[group] for subtiles, _ in terms])
            offsets = [
                tile.per_row(r * x * (-factor / count))
                for x, (_, factor) in zip(sums, terms, strict=True)
            ]
            for v, x in zip(g[group], xhat[group], strict=True):
                offset = offsets[0] * x.astype(jnp.float32)
                if len(offsets) > 1:
                    offset = offset + offsets[1]
                dz.append(tile.per_row(r) * v + offset)
        return dz

    def _store(self, dz, results: _Results, tile: Tile, scale):
        tile.store((v.astype(jnp.bfloat16) for v in dz), results.dz)
        if self.dz_fp8 is None:
            return
        if scale is None:
            scale_inv = row_scale_inv(tile.amax(dz))
            results.dz_scale_inv[tile.row_values] = scale_inv
            scale = tile.per_row(1.0 / scale_inv)
        scaled = (saturate(v * scale, self.dz_fp8) for v in dz)
        tile.store(scaled, results.dz_fp8)
