"""Norm, activation and quantization of rows in one pass: the companion of XLA's GEMM.

    z' = z + bias        u = gamma norm(z') + beta        y = activation(u)

For sites too wide for the fused kernel (`dense_norm`): XLA multiplies and writes z
(M, N) in bfloat16, this kernel reads it once and writes what is wanted. Nothing but
memory bandwidth should limit it. `rows` has the layout.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    NORM_BLOCK,
    XHAT_MAX_FEATURES,
    XHAT_SCALE_INV,
    ActivationName,
    Normed,
    NormName,
    Outputs,
    norm_features,
)
from loka_jax.pallas import rows
from loka_jax.pallas.activations import activate_scaled, input_scale
from loka_jax.pallas.row_tiles import Tile, Walk, column_loader, row_scale_inv, saturate
from loka_jax.pallas.rows import RowLayout, Settings

_WIDEST_UNFOLDED = 2048  # columns beyond which unfolded rows spill registers


def why_not(
    m: int, n: int, *, norm: NormName, settings: Settings | None = None
) -> str | None:
    """Returns why rows of this shape are not served, or None if they are."""
    reason = rows.why_not(m, n, widest_unfolded=_WIDEST_UNFOLDED)
    if reason is not None:
        return reason
    if norm == "block" and n % norm_features(norm, n):
        return f"n={n} is not a multiple of the norm's block, {NORM_BLOCK}"
    if settings is None:
        return None
    return RowLayout(m, n, settings).why_not(norm, element_bytes=2)


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
    if n > 1024 and norm != "block" and n % rows.FOLD_MULTIPLE == 0:
        lanes = 128
    else:
        lanes = {256: 8, 512: 16}.get(n, 32)
    # About 32 values a lane hide the latencies, and leave room for two parameters.
    lane_rows = max(1, 1024 // n) if lanes == 32 else 1
    return Settings(
        lanes=lanes,
        rows=lane_rows,
        warpgroups=4 if n // lanes * lane_rows <= 32 else 2,
        resident=parameters * (n // lanes) <= 64,
    )


def search_space(m: int, n: int, *, norm: NormName) -> list[Settings]:
    """Returns the settings worth measuring for a shape, the default one first."""
    space = [default_settings(m, n, norm=norm)]
    options = ((8, 16, 32, 128), (1, 2), (0, 3), (2, 4, 6), (True, False))
    for settings in itertools.starmap(Settings, itertools.product(*options)):
        columns, warpgroups = n // settings.lanes, settings.warpgroups
        # Each lane has 512 registers if there is one warpgroup. More warpgroups than
        # fit spill, fewer do not hide the latencies.
        values, parameters = columns * settings.rows, 2 * settings.resident * columns
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

    The variance is taken of the differences from the mean, in float32.

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
        y_scale_inv: scale of the FP8 output if `want.y_fp8` is "tensorwise"; larger
            values saturate.
        settings: the layout of the launch; chosen by shape if None.
        interpret: `plgpu.InterpretGPUParams` to interpret the kernel on a CPU.

    Raises:
        ValueError: with the reason if this shape or these settings are not served.
    """
    m, n = z.shape
    if settings is None:
        parameters = sum(p is not None for p in (bias, gamma, beta))
        settings = default_settings(m, n, norm=norm, parameters=parameters)
    reason = why_not(m, n, norm=norm, settings=settings)
    if reason is not None:
        raise ValueError(f"norm_quantize: {reason}.")
    assert norm in ("layer", "rms") or (gamma is None and beta is None)
    assert (want.y_fp8 == "tensorwise") == (y_scale_inv is not None)
    layout = RowLayout(m, n, settings)
    inputs = _Inputs(
        z=layout.fold_matrix(z),
        scalars=tuple(s.reshape(1) for s in scales if s.size == 1),
        row_scales=tuple(s.reshape(m) for s in scales if s.size != 1),
        bias=layout.fold_vector(bias),
        gamma=layout.fold_vector(gamma),
        beta=layout.fold_vector(beta),
        y_scale_inv=None if y_scale_inv is None else y_scale_inv.reshape(1),
    )
    kernel = _Kernel(layout, norm, activation, epsilon, want)
    return _normed(kernel.launch(inputs, interpret), m, n, y_scale_inv)


class _Inputs(NamedTuple):
    """The kernel's operands, or references to them; None for what is absent."""

    z: Any
    scalars: tuple
    row_scales: tuple
    bias: Any
    gamma: Any
    beta: Any
    y_scale_inv: Any


class _Results(NamedTuple):
    """What the kernel writes, or references to it; None for what it does not."""

    y: Any
    y_fp8: Any
    y_scale_inv: Any
    y_amax: Any
    xhat: Any
    rstd: Any


def _normed(results: _Results, m: int, n: int, y_scale_inv) -> Normed:
    """Returns the kernel's results as matrices that are not folded."""
    y, y_fp8, xhat = (
        None if x is None else x.reshape(m, n)
        for x in (results.y, results.y_fp8, results.xhat)
    )
    if y_fp8 is not None:
        by_row = results.y_scale_inv
        y_fp8 = Fp8Array(y_fp8, y_scale_inv if by_row is None else by_row[:, None])
    return Normed(y, y_fp8, xhat, results.rstd, results.y_amax)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """The static side of a launch."""

    layout: RowLayout
    norm: NormName
    activation: ActivationName
    epsilon: float
    want: Outputs

    def launch(self, inputs: _Inputs, interpret) -> _Results:
        layout = self.layout
        scratch = layout.scratch([jnp.bfloat16])
        return layout.launch(self._body, inputs, self._results(), scratch, interpret)

    def _results(self) -> _Results:
        want, layout = self.want, self.layout
        row = jax.ShapeDtypeStruct((layout.m,), jnp.float32)
        rstd, blocks = row, len(layout.pieces)
        if self.norm == "block" and blocks > 1:
            rstd = jax.ShapeDtypeStruct((blocks, layout.m), jnp.float32)
        return _Results(
            y=layout.matrix_type(jnp.bfloat16) if want.y else None,
            y_fp8=layout.matrix_type(E4M3) if want.y_fp8 else None,
            y_scale_inv=row if want.y_fp8 == "rowwise" else None,
            y_amax=row if want.y_amax else None,
            xhat=layout.matrix_type(want.xhat) if want.xhat is not None else None,
            rstd=rstd if want.rstd else None,
        )

    def _body(self, inputs: _Inputs, results: _Results, **scratch):
        walk = Walk(self.layout, [inputs.z], **scratch)
        factor = input_scale(self.activation)
        column = column_loader(
            self.layout,
            bias=(inputs.bias, 1.0),
            gamma=(inputs.gamma, factor),
            beta=(inputs.beta, factor),
        )
        y_scale = None if inputs.y_scale_inv is None else 1.0 / inputs.y_scale_inv[0]
        scalars = [scale[0] for scale in inputs.scalars]
        walk.start()

        @pl.loop(0, walk.steps)
        def _(step):
            tile = walk.tile(step)
            [z] = walk.load(tile)
            factors = scalars + [tile.load_row_values(s) for s in inputs.row_scales]
            z = [v.astype(jnp.float32) for v in z]
            if factors:
                factor = tile.per_row(functools.reduce(jnp.multiply, factors))
                z = [v * factor for v in z]
            xhat = self._normalized(z, column("bias"), results, tile)
            if results.xhat is not None:
                tile.store(map(self._stored_xhat, xhat), results.xhat)
            affine = zip(xhat, column("gamma"), column("beta"), strict=True)
            y = [self._activated(*parts, tile) for parts in affine]
            self._store_y(y, y_scale, results, tile)

    def _normalized(self, z, bias, results: _Results, tile: Tile):
        """Returns the normalized pieces of z + bias, and stores their deviations."""
        if bias[0] is not None:
            z = [v + tile.per_column(b) for v, b in zip(z, bias, strict=True)]
        if self.norm == "none":
            return z
        if self.norm != "block":
            xhat, rstd = self._normalize(z, tile)
            if results.rstd is not None:
                results.rstd[tile.vector] = rstd
            return xhat
        xhat = []
        for i, v in enumerate(z):
            [v], rstd = self._normalize([v], tile)
            xhat.append(v)
            if results.rstd is not None:
                at = (i, tile.vector) if len(z) > 1 else tile.vector
                results.rstd[at] = rstd
        return xhat

    def _normalize(self, pieces, tile: Tile):
        """Returns normalized pieces and the reciprocal deviations of their rows."""

        def mean(pieces, exchange):
            [total] = tile.sums([pieces], exchange=exchange)
            return total * (1 / (len(pieces) * self.layout.width * self.layout.fold))

        if self.norm == "layer":
            shift = tile.per_row(mean(pieces, 0))
            pieces = [v - shift for v in pieces]
        rstd = lax.rsqrt(mean([v * v for v in pieces], 1) + self.epsilon)
        return [v * tile.per_row(rstd) for v in pieces], rstd

    def _stored_xhat(self, v):
        """Returns a normalized piece the way it is stored."""
        if self.want.xhat != E4M3:
            return v.astype(self.want.xhat)
        v = v * (1 / XHAT_SCALE_INV)
        features = norm_features(self.norm, self.layout.n)
        return v.astype(E4M3) if features <= XHAT_MAX_FEATURES else saturate(v, E4M3)

    def _activated(self, v, gamma, beta, tile: Tile):
        """Returns the activations of a normalized piece.

        gamma and beta were loaded to give what the activation wants.
        """
        if gamma is not None:
            v = v * tile.per_column(gamma)
        elif input_scale(self.activation) != 1.0:
            v = v * input_scale(self.activation)
        if beta is not None:
            v = v + tile.per_column(beta)
        return activate_scaled(self.activation, v)

    def _store_y(self, y, y_scale, results: _Results, tile: Tile):
        """Stores activations; `y_scale` is theirs if it was given in advance."""
        if results.y is not None:
            tile.store((v.astype(jnp.bfloat16) for v in y), results.y)
        if results.y_amax is not None or results.y_scale_inv is not None:
            amax = tile.amax(y)
            if results.y_amax is not None:
                results.y_amax[tile.vector] = amax
            if results.y_scale_inv is not None:
                scale_inv = row_scale_inv(amax)
                results.y_scale_inv[tile.vector] = scale_inv
                y_scale = tile.per_row(1.0 / scale_inv)
        if results.y_fp8 is not None:
            tile.store((saturate(v * y_scale, E4M3) for v in y), results.y_fp8)
