"""Norm, activation and quantization of rows in one pass, after a GEMM by XLA.

    z' = z + bias        u = gamma norm(z') + beta        y = activation(u)

For sites too large for the fused kernel (`dense_norm`): XLA multiplies and writes z
(M, N) in bfloat16; this kernel reads z once and writes the requested outputs. It is
limited by memory bandwidth alone. `rows` has the layout.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    NO_VECTORS,
    NORM_BLOCK,
    Epilogue,
    Normed,
    NormName,
    NormVectors,
    Outputs,
    norm_features,
    xhat_scale_inv,
)
from loka_jax.pallas import rows, tiles
from loka_jax.pallas.activations import activate_scaled, input_scale
from loka_jax.pallas.row_tiles import (
    Tile,
    TilePipeline,
    column_loader,
    row_scale_inv,
    saturate,
)
from loka_jax.pallas.rows import RowLayout, TuningConfig

_MAX_UNFOLDED = 2048  # columns; longer unfolded rows spill registers


def why_not(
    m: int, n: int, *, norm: NormName, config: TuningConfig | None = None
) -> str | None:
    """Returns why rows of this shape are not served, or None if they are."""
    reason = rows.why_not(m, n, max_unfolded=_MAX_UNFOLDED)
    if reason is not None:
        return reason
    if norm == "block" and n % norm_features(norm, n):
        return f"n={n} is not a multiple of the norm's block, {NORM_BLOCK}"
    if config is None:
        return None
    return RowLayout(m, n, config).why_not(norm, element_bytes=2)


def default_config(n: int, *, norm: NormName, num_vectors: int = 2) -> TuningConfig:
    """Returns the default config for rows of n columns."""
    if n > 1024 and norm != "block" and n % rows.FOLD_MULTIPLE == 0:
        lanes = 128
    else:
        lanes = {256: 8, 512: 16}.get(n, 32)
    # About 32 values per lane hide the latencies, and leave room for two vectors.
    lane_rows = max(1, 1024 // n) if lanes == 32 else 1
    return TuningConfig(
        lanes=lanes,
        rows=lane_rows,
        warpgroups=4 if n // lanes * lane_rows <= 32 else 2,
        keep_vectors=num_vectors * (n // lanes) <= 64,
    )


def norm_quantize(
    z: Float[Array, "m n"],
    scales: Sequence[Float[Array, "..."]] = (),
    vectors: NormVectors = NO_VECTORS,
    *,
    epilogue: Epilogue,
    want: Outputs,
    y_scale_inv: Float[Array, ""] | None = None,
    config: TuningConfig | None = None,
    interpret: Any = None,
) -> Normed:
    """Returns the requested outputs of `activation(norm(scales z + bias))`.

    The variance is the mean squared difference from the mean, in float32.

    Args:
        scales: float32 factors of z, each of shape `[]` or `[m, 1]`: the scales of an
            FP8 product that were not applied yet.
        vectors: gamma and beta only with "layer" and "rms" norms.
        want: the outputs. A row of zeros has a positive scale; a row with a NaN or an
            infinity is NaN throughout.
        y_scale_inv: scale of the FP8 output if `want.y_fp8` is "tensorwise"; larger
            values saturate.

    Raises:
        ValueError: if this shape or this config is not served (see `why_not`).
    """
    (m, n), norm = z.shape, epilogue.norm
    bias, gamma, beta = vectors
    if config is None:
        num_vectors = sum(vector is not None for vector in vectors)
        config = default_config(n, norm=norm, num_vectors=num_vectors)
    reason = why_not(m, n, norm=norm, config=config)
    if reason is not None:
        raise ValueError(f"norm_quantize: {reason}.")
    assert norm in ("layer", "rms") or (gamma is None and beta is None)
    assert (want.y_fp8 == "tensorwise") == (y_scale_inv is not None)
    layout = RowLayout(m, n, config)
    inputs = _Inputs(
        z=layout.fold_matrix(z),
        scalars=tuple(s.reshape(1) for s in scales if s.size == 1),
        row_scales=tuple(s.reshape(m) for s in scales if s.size != 1),
        bias=layout.fold_vector(bias),
        gamma=layout.fold_vector(gamma),
        beta=layout.fold_vector(beta),
        y_scale_inv=None if y_scale_inv is None else y_scale_inv.reshape(1),
    )
    kernel = _Kernel(layout, epilogue, want)
    return _normed(kernel.launch(inputs, interpret), m, n, y_scale_inv)


class _Inputs(NamedTuple):
    """The kernel's operands, or references to them; None where absent."""

    z: Any
    scalars: tuple
    row_scales: tuple
    bias: Any
    gamma: Any
    beta: Any
    y_scale_inv: Any


class _Results(NamedTuple):
    """The kernel's outputs, or references to them; None where not requested."""

    y: Any
    y_fp8: Any
    y_scale_inv: Any
    y_amax: Any
    xhat: Any
    rstd: Any


def _normed(results: _Results, m: int, n: int, y_scale_inv) -> Normed:
    """Returns the kernel's outputs, unfolded."""
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
    epilogue: Epilogue
    want: Outputs

    @tiles.lowered_once
    def launch(self, inputs: _Inputs, interpret) -> _Results:
        layout = self.layout
        scratch = layout.scratch([jnp.bfloat16])
        return layout.launch(self._body, inputs, self._results(), scratch, interpret)

    def _results(self) -> _Results:
        want, layout = self.want, self.layout
        row = jax.ShapeDtypeStruct((layout.m,), jnp.float32)
        rstd, blocks = row, len(layout.subtiles)
        if self.epilogue.norm == "block" and blocks > 1:
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
        pipeline = TilePipeline(self.layout, [inputs.z], **scratch)
        factor = input_scale(self.epilogue.activation)
        column = column_loader(
            self.layout,
            bias=(inputs.bias, 1.0),
            gamma=(inputs.gamma, factor),
            beta=(inputs.beta, factor),
        )
        y_scale = None if inputs.y_scale_inv is None else 1.0 / inputs.y_scale_inv[0]
        scalars = [scale[0] for scale in inputs.scalars]
        pipeline.start()

        @pl.loop(0, pipeline.steps)
        def _(step):
            tile = pipeline.tile(step)
            [z] = pipeline.load(tile)
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
        """Returns the normalized subtiles of z + bias, and stores rstd."""
        if bias[0] is not None:
            z = [v + tile.per_column(b) for v, b in zip(z, bias, strict=True)]
        if self.epilogue.norm == "none":
            return z
        if self.epilogue.norm != "block":
            xhat, rstd = self._normalize(z, tile)
            if results.rstd is not None:
                results.rstd[tile.row_values] = rstd
            return xhat
        xhat = []
        for i, v in enumerate(z):
            [v], rstd = self._normalize([v], tile)
            xhat.append(v)
            if results.rstd is not None:
                at = (i, tile.row_values) if len(z) > 1 else tile.row_values
                results.rstd[at] = rstd
        return xhat

    def _normalize(self, subtiles, tile: Tile):
        """Returns normalized subtiles and rstd of their rows."""

        def mean(subtiles, exchange):
            [total] = tile.sums([subtiles], exchange=exchange)
            return total * (1 / (len(subtiles) * self.layout.width * self.layout.fold))

        if self.epilogue.norm == "layer":
            shift = tile.per_row(mean(subtiles, 0))
            subtiles = [v - shift for v in subtiles]
        rstd = lax.rsqrt(mean([v * v for v in subtiles], 1) + self.epilogue.epsilon)
        return [v * tile.per_row(rstd) for v in subtiles], rstd

    def _stored_xhat(self, v):
        """Returns a normalized subtile in the dtype and scale of the output xhat."""
        if self.want.xhat != E4M3:
            return v.astype(self.want.xhat)
        v = v * (1 / xhat_scale_inv(self.epilogue.norm, self.layout.n))
        return v.astype(E4M3)

    def _activated(self, v, gamma, beta, tile: Tile):
        """Returns the activations of a normalized subtile.

        gamma and beta include the activation's input scale.
        """
        if gamma is not None:
            v = v * tile.per_column(gamma)
        elif input_scale(self.epilogue.activation) != 1.0:
            v = v * input_scale(self.epilogue.activation)
        if beta is not None:
            v = v + tile.per_column(beta)
        return activate_scaled(self.epilogue.activation, v)

    def _store_y(self, y, y_scale, results: _Results, tile: Tile):
        """Stores activations; `y_scale` is the reciprocal of `y_scale_inv`, if any."""
        if results.y is not None:
            tile.store((v.astype(jnp.bfloat16) for v in y), results.y)
        if results.y_amax is not None or results.y_scale_inv is not None:
            amax = tile.amax(y)
            if results.y_amax is not None:
                results.y_amax[tile.row_values] = amax
            if results.y_scale_inv is not None:
                scale_inv = row_scale_inv(amax)
                results.y_scale_inv[tile.row_values] = scale_inv
                y_scale = tile.per_row(1.0 / scale_inv)
        if results.y_fp8 is not None:
            tile.store((saturate(v * y_scale, E4M3) for v in y), results.y_fp8)
