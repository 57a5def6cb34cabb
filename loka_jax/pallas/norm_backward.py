"""Backward pass of activation and norm in one pass over rows: `norm_quantize`'s other
half, before XLA's GEMMs.

    du = dy activation'(u)    u = gamma xhat + beta    g = gamma du
    dz = rstd (g - mean(g) - xhat mean(g xhat))
    dgamma = sum over rows of du xhat    dbeta = sum over rows of du

of which RMS and block norms drop `mean(g)`, and no norm leaves `dz = du`. dz is written
in bfloat16, and in FP8 if asked for, with one scale a row or one given for all. Nothing
but memory bandwidth should limit it.

Rows lie in registers as `rows` says, each in a warp, or folded over all four, which
`column_sums` needs.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    NORM_BLOCK,
    XHAT_SCALE_INV,
    ActivationName,
    NormGradients,
    NormName,
    norm_features,
)
from loka_jax.pallas import column_sums, rows
from loka_jax.pallas.activations import input_scale, slope_scaled
from loka_jax.pallas.row_tiles import (
    Tile,
    Walk,
    column_loader,
    opaque,
    row_scale_inv,
    saturate,
)
from loka_jax.pallas.rows import RowLayout, Settings

# Columns beyond which the column sums of unfolded rows spill registers.
_WIDEST_UNFOLDED = 1024
_WIDEST_BLOCKS = 2048  # the same for block norms, which have no such sums


def why_not(
    m: int,
    n: int,
    *,
    norm: NormName,
    xhat_dtype: DTypeLike,
    settings: Settings | None = None,
) -> str | None:
    """Returns why rows of this shape are not served, or None if they are."""
    widest = rows.MAX_COLUMNS if norm == "block" else _WIDEST_UNFOLDED
    reason = rows.why_not(m, n, widest_unfolded=widest)
    if reason is not None:
        return reason
    if norm == "block" and (n % norm_features(norm, n) or n > _WIDEST_BLOCKS):
        return f"n={n} is not a multiple of {NORM_BLOCK} up to {_WIDEST_BLOCKS}"
    dtype = jnp.dtype(xhat_dtype)
    if dtype not in (jnp.dtype(E4M3), jnp.dtype(jnp.bfloat16)):
        return f"xhat is {dtype.name}, neither bfloat16 nor E4M3"
    if norm == "none" and dtype == E4M3:
        return "without a norm xhat is in bfloat16"
    if settings is None:
        return None
    if settings.lanes not in (32, 128):
        return f"lanes={settings.lanes} leave sums of columns in several lanes"
    layout = RowLayout(m, n, settings)
    sums = column_sums.area_bytes(layout) if norm in ("layer", "rms") else 0
    return layout.why_not(norm, element_bytes=2 + dtype.itemsize, extra_bytes=sums)


def default_settings(
    m: int, n: int, *, norm: NormName, xhat_dtype: DTypeLike
) -> Settings:
    """Returns the settings used where none are given."""
    del m
    if n >= 1024 and norm != "block" and n % rows.FOLD_MULTIPLE == 0:
        return Settings(lanes=128, warpgroups=4 if n <= 2048 else 2)
    if n > 512:
        return Settings(stages=2, warpgroups=2, resident=False)
    return Settings(rows=max(1, 512 // n))


def search_space(
    m: int, n: int, *, norm: NormName, xhat_dtype: DTypeLike
) -> list[Settings]:
    """Returns the settings worth measuring for a shape, the default one first."""
    space = [default_settings(m, n, norm=norm, xhat_dtype=xhat_dtype)]
    parameters = 2 * (norm in ("layer", "rms"))
    options = ((32, 128), (1, 2, 4), (3, 5), (2, 4, 6), (True, False))
    for settings in itertools.starmap(Settings, itertools.product(*options)):
        resident, warpgroups = settings.resident, settings.warpgroups
        # A lane has 512 registers if there is one warpgroup. It holds g, xhat and sums.
        values = 2 * settings.rows + parameters * (1 + resident)  # for each column
        registers = n // settings.lanes * values + 32
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
    dz_fp8: DTypeLike | None = None,
    dz_scale_inv: Float[Array, ""] | None = None,
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
        dz_fp8: write dz in this format too.
        dz_scale_inv: its scale, which makes larger values saturate; None for one a row:
            a row of zeros has a positive scale, a row with a NaN or an infinity is NaN
            throughout.
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
    layout = RowLayout(m, n, settings)
    is_given = dz_scale_inv is not None
    assert dz_fp8 is not None or not is_given
    inputs = _Inputs(
        dy=layout.fold_matrix(dy),
        xhat=layout.fold_matrix(xhat),
        rstd=None if rstd is None else rstd.reshape(-1, m),
        gamma=layout.fold_vector(gamma),
        beta=layout.fold_vector(beta),
        dz_scale_inv=None if dz_scale_inv is None else dz_scale_inv.reshape(1),
    )
    given = dict(gamma=gamma is not None, beta=beta is not None)
    summed = tuple(name for name in given if given[name])
    kernel = _Kernel(layout, xhat.dtype, norm, activation, dz_fp8, is_given, summed)
    return kernel.gradients(kernel.launch(inputs, interpret), dz_scale_inv)


class _Inputs(NamedTuple):
    """The kernel's operands, or references to them; None for what is absent."""

    dy: Any
    xhat: Any
    rstd: Any
    gamma: Any
    beta: Any
    dz_scale_inv: Any


class _Results(NamedTuple):
    """What the kernel writes, or references to it; None for what it does not."""

    dz: Any
    dz_fp8: Any
    dz_scale_inv: Any
    dz_amax: Any
    sums: Any


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The static side of a launch.

    Attributes:
        layout: of the rows.
        xhat_dtype: bfloat16 or E4M3.
        norm, activation: of the forward pass.
        dz_fp8: format that dz is written in besides, or None.
        is_scale_given: scale that by a number given, not by rows.
        summed: parameters whose gradients are summed over the rows.
    """

    layout: RowLayout
    xhat_dtype: DTypeLike
    norm: NormName
    activation: ActivationName
    dz_fp8: DTypeLike | None
    is_scale_given: bool
    summed: tuple[str, ...]

    @property
    def xhat_scale(self) -> float:
        """What xhat as it is stored is multiplied by."""
        return XHAT_SCALE_INV if jnp.dtype(self.xhat_dtype) == E4M3 else 1.0

    @property
    def gamma_scale(self) -> float:
        """What gamma is multiplied by once, to spare products for every element."""
        return self.xhat_scale * input_scale(self.activation)

    @property
    def scales_rows(self) -> bool:
        """Whether dz has a scale a row in FP8."""
        return self.dz_fp8 is not None and not self.is_scale_given

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
            dz_amax=part if self.is_scale_given else None,
            sums=column_sums.result_type(layout, count) if count else None,
        )

    def gradients(self, results: _Results, scale_inv) -> NormGradients:
        """Returns matrices that are not folded, and the sums over all CTAs."""
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
        dgamma, dbeta = sums.get("gamma"), sums.get("beta")
        return NormGradients(dz, dz_fp8, results.dz_amax, dgamma, dbeta)

    def _body(self, inputs: _Inputs, results: _Results, sums: Any = None, **scratch):
        layout = self.layout
        walk = Walk(layout, [inputs.dy, inputs.xhat], **scratch)
        column = column_loader(
            layout,
            gamma=(inputs.gamma, self.gamma_scale),
            beta=(inputs.beta, input_scale(self.activation)),
        )
        walk.start()
        scale = None
        if self.is_scale_given:
            scale = 1.0 / inputs.dz_scale_inv[0]
        blocks = 0 if inputs.rstd is None else inputs.rstd.shape[0]

        def advance(step, carry):
            totals, largest = carry
            tile = walk.tile(step)
            # On its way while the tile is waited for.
            rstd = [tile.load_row_values(inputs.rstd, i) for i in range(blocks)]
            dy, xhat = walk.load(tile)
            g, on_xhat, totals = self._activation_backward(
                dy, xhat, column, totals, tile
            )
            dz = self._norm_backward(g, on_xhat, xhat, rstd, tile)
            self._store(dz, results, tile, scale)
            return totals, [column_sums.largest(v, dz) for v in largest]

        totals = [column_sums.zeros(layout) for _ in self.summed]
        largest = [column_sums.zeros(layout)[0]] if self.is_scale_given else []
        totals, largest = lax.fori_loop(0, walk.steps, advance, (totals, largest))
        for value in largest:
            results.dz_amax[walk.parts] = jnp.max(value, axis=1)
        if self.summed:
            column_sums.write(layout, totals, results.sums, **sums)

    def _activation_backward(self, dy, xhat, column, totals, tile: Tile):
        """Returns g, g xhat and the totals of columns advanced, all in pieces.

        Up to constants: xhat as it is stored, and gamma as it was loaded.
        """
        g, on_xhat = [], []
        totals = [list(pieces) for pieces in totals]
        gammas, betas = column("gamma"), column("beta")
        for i, (gamma, beta) in enumerate(zip(gammas, betas, strict=True)):
            x = xhat[i].astype(jnp.float32)
            gamma = None if gamma is None else tile.per_column(gamma)
            du = self._slope_times(dy[i].astype(jnp.float32), x, gamma, beta, tile)
            for total, name in zip(totals, self.summed, strict=True):
                term = du * x if name == "gamma" else du
                total[i] = total[i] + column_sums.sum_rows(term)
            g.append(du if gamma is None else du * gamma)
            on_xhat.append(g[-1] * x)
        return g, on_xhat, totals

    def _slope_times(self, dy, x, gamma, beta, tile: Tile):
        """Returns dy times the activation's slope at gamma x + beta."""
        if self.activation == "none":
            return dy
        if gamma is not None:
            u = x * gamma
        else:
            u = x if self.gamma_scale == 1.0 else x * self.gamma_scale
        if beta is not None:
            u = u + tile.per_column(beta)
        if self.activation == "relu":
            return jnp.where(u > 0.0, dy, 0.0)
        return dy * slope_scaled(self.activation, u)

    def _norm_backward(self, g, on_xhat, xhat, rstd, tile: Tile):
        """Returns dz in pieces of float32.

        Args:
            g, on_xhat: pieces from `_activation_backward`.
            xhat: pieces as they are stored.
            rstd: for each group of pieces that share a deviation.
            tile: whose rows they are.
        """
        if self.norm == "none":
            return g
        # Widened again rather than kept wide: it would take up to four times the
        # registers.
        xhat = [opaque(x) for x in xhat]
        size = len(g) // len(rstd)  # a block is a piece
        count = size * self.layout.width * self.layout.fold
        # What is averaged over a row, and its factor beside those in g.
        terms = [(on_xhat, self.xhat_scale**2)]
        if self.norm == "layer":
            terms.append((g, 1.0))
        dz = []
        for first, r in zip(range(0, len(g), size), rstd, strict=True):
            group = slice(first, first + size)
            r = r * (1 / self.gamma_scale if "gamma" in self.summed else 1.0)
            sums = tile.sums([pieces[group] for pieces, _ in terms])
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
            results.dz_scale_inv[tile.vector] = scale_inv
            scale = tile.per_row(1.0 / scale_inv)
        scaled = (saturate(v * scale, self.dz_fp8) for v in dz)
        tile.store(scaled, results.dz_fp8)
