"""Norm, residual and activation after a product by Triton, in one pass each way.

    forward   xhat = norm(z + bias + r)    y = activation(u)    u = gamma xhat + beta
    backward  g = gamma du    du = (d + r) activation'(u)
              dz = rstd (g - mean(g) - xhat mean(g xhat))

A block norm's statistics are those of `NORM_BLOCK` columns, which one tile holds. Those
of a "layer" or "rms" norm, which alone have gamma and beta, are of whole rows: a
program computes all tiles of its rows, and reads them twice, the second time from the
cache where that holds them. So rows may have any length. y and dz are also written in
FP8, as they are and transposed. Without a norm, `dz = g`; only "layer" has mean(g).
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3
from loka_jax.normed import (
    NO_VECTORS,
    NORM_BLOCK,
    Epilogue,
    NormName,
    NormResiduals,
    NormVectors,
    norm_features,
    xhat_scale_inv,
)
from loka_jax.tails import Forms, NormTail, NormTailGradients, Scale, Scaled
from loka_jax.triton import tail
from loka_jax.triton.launch import power_of_two
from loka_jax.triton.tail import Arguments, TuningConfig

_MIN_COLUMNS = 16
_OF_ROWS: tuple[NormName, ...] = ("layer", "rms")
CONFIGS = (
    TuningConfig(64, NORM_BLOCK, 16),
    TuningConfig(64, NORM_BLOCK, 8),
    TuningConfig(32, NORM_BLOCK, 8),
    TuningConfig(32, NORM_BLOCK, 4),
)
# The fastest on an H200 at 65,536 x 3,456, either way with a norm, of a cast without.
DEFAULT = TuningConfig(32, NORM_BLOCK, 8)
NO_NORM_DEFAULT = TuningConfig(64, 128, 4)
# Of whole rows: few, so that the cache holds what the running programs read twice, and
# tiles that leave registers for two programs. Not timed yet.
ROW_DEFAULT = TuningConfig(32, 128, 8)
# Of whole rows without vectors and activation: the fastest on an H100 at 16,384 x 2,048
# where the transposed form is written, whose runs are as long as a tile has rows, and
# where it is not.
PLAIN_ROWS_TRANSPOSED = TuningConfig(32, 512, 8)
PLAIN_ROWS = TuningConfig(16, 1024, 8)


def why_not(
    m: int,
    n: int,
    *operands: Scaled | Array | None,
    norm: NormName,
    config: TuningConfig | None = None,
) -> str | None:
    """Returns why rows of n columns are not served, or None if they are.

    Args:
        m, n: of the matrices.
        operands: as in `tail.why_not`.
        norm: of the rows.
        config: of a launch; any if None.
    """
    columns = _columns(norm, n)
    if config is not None and norm == "block" and config.block_n != columns:
        return f"{config} has tiles of {config.block_n} columns, not {columns}"
    return tail.why_not(m, n, *operands)


def norm_tail(
    z: Scaled,
    r: Float[Array, "m n"] | None = None,
    vectors: NormVectors = NO_VECTORS,
    *,
    epilogue: Epilogue,
    want: Forms,
    y_scale_inv: Scale | None = None,
    xhat: DTypeLike | None = E4M3,
    config: TuningConfig | None = None,
) -> NormTail:
    """Returns `activation(gamma norm(z + bias + r) + beta)`, and what backward reads.

    Args:
        z: the product.
        r: bfloat16 summand, or None.
        vectors: bias, and gamma and beta of a norm of whole rows.
        epilogue: norm and activation.
        want: the forms of y.
        y_scale_inv: scale of the FP8 form.
        xhat: dtype in which normalized rows are kept, E4M3 or bfloat16 (always
            bfloat16 without a norm); None to return no residuals.
        config: the tuning config; None for the default.

    Raises:
        ValueError: if these operands are not served (see `why_not`), or gamma or beta
            are given to a norm without them.
        ImportError: if jax-triton is not installed.
    """
    m, n = want.shape_of(z.data)
    config = config or _default(epilogue, n, vectors, want)
    _require_served("norm_tail", (m, n), epilogue.norm, config, z, r)
    operands = Arguments.of((m, n), want)
    operands.add_scaled("z", z)
    operands.add_matrix("r", r)
    _add_vectors(operands, vectors, epilogue.norm)
    operands.add_forms(want, y_scale_inv)
    keep, is_norm = xhat is not None, epilogue.norm != "none"
    dtype = jnp.bfloat16 if xhat is None or not is_norm else xhat
    operands.constants.update(
        _constants(epilogue, n, dtype), has_residuals=keep, epsilon=epilogue.epsilon
    )
    # Not above: they import Triton.
    from loka_jax.triton import norm_tail_kernel, row_norm_tail_kernel

    by_row = epilogue.norm in _OF_ROWS
    kernel = norm_tail_kernel.norm_tail_kernel
    if by_row:
        kernel = row_norm_tail_kernel.row_norm_tail_kernel
    blocks = -(-n // norm_features(epilogue.norm, n))
    has_rstd, out_shape = keep and is_norm, operands.out_shape
    types = [
        *tail.result_types(out_shape, want, config),
        tail.optional_type(keep, out_shape, dtype),
        tail.optional_type(has_rstd, (blocks, m) if blocks > 1 else (m,), jnp.float32),
    ]
    *y, kept, rstd = tail.run(kernel, operands, types, config, by_row=by_row)
    residuals = NormResiduals(kept, rstd if has_rstd else None) if keep else None
    return NormTail(tail.written(y, want, y_scale_inv), residuals)


def norm_tail_backward(
    d: Scaled,
    r: Float[Array, "m n"] | None,
    residuals: NormResiduals,
    vectors: NormVectors = NO_VECTORS,
    *,
    epilogue: Epilogue,
    want: Forms,
    dz_scale_inv: Scale | None = None,
    config: TuningConfig | None = None,
) -> NormTailGradients:
    """Returns the gradients of z and the vectors, where y has the gradient `d + r`.

    Deterministic.

    Args:
        d: first summand of the gradient of y.
        r: second summand, bfloat16, or None.
        residuals, vectors, epilogue: of the forward pass. Without a norm, y in any of
            its forms serves the backward pass of relu, which reads only signs.
        want: the forms of dz.
        dz_scale_inv: scale of the FP8 form.
        config: the tuning config; None for the default.

    Raises:
        ValueError: if these operands are not served (see `why_not`), or gamma or beta
            are given to a norm without them.
        ImportError: if jax-triton is not installed.
    """
    m, n = want.shape_of(d.data)
    xhat, rstd = residuals
    config = config or _default(epilogue, n, vectors, want)
    _require_served("norm_tail_backward", (m, n), epilogue.norm, config, d, r, xhat)
    operands = Arguments.of((m, n), want)
    operands.add_scaled("d", d)
    operands.add_matrix("r", r)
    operands.add_matrix("xhat", xhat)
    operands.arrays.append(xhat if rstd is None else rstd)
    _add_vectors(operands, vectors, epilogue.norm)
    operands.add_forms(want, dz_scale_inv)
    operands.constants.update(_constants(epilogue, n, xhat.dtype))
    from loka_jax.triton import norm_tail_kernel, row_norm_tail_kernel

    by_row = epilogue.norm in _OF_ROWS
    kernel = norm_tail_kernel.norm_tail_backward_kernel
    if by_row:
        kernel = row_norm_tail_kernel.row_norm_tail_backward_kernel
    has_sum = [vector is not None for vector in vectors]
    sums_shape = config.tiles_m(m), n
    types = [
        *tail.result_types(operands.out_shape, want, config),
        *(tail.optional_type(has, sums_shape, jnp.float32) for has in has_sum),
    ]
    results = tail.run(kernel, operands, types, config, by_row=by_row)
    dz, sums = results[: -len(has_sum)], results[-len(has_sum) :]
    gradients = NormVectors(
        *(
            jnp.sum(parts, axis=0) if has else None
            for parts, has in zip(sums, has_sum, strict=True)
        )
    )
    return NormTailGradients(tail.written(dz, want, dz_scale_inv), gradients)


def _add_vectors(operands: Arguments, vectors: NormVectors, norm: NormName):
    if norm not in _OF_ROWS and (vectors.gamma, vectors.beta) != (None, None):
        raise ValueError(f"norm {norm!r} takes neither gamma nor beta.")
    for name, vector in vectors._asdict().items():
        operands.add(name, vector)


def _columns(norm: NormName, n: int) -> int:
    """Returns the columns of a tile that holds all that share a block's statistic."""
    return max(power_of_two(norm_features(norm, n)), _MIN_COLUMNS)


def _default(
    epilogue: Epilogue, n: int, vectors: NormVectors, want: Forms
) -> TuningConfig:
    """Returns the config of a launch that is given none."""
    norm = epilogue.norm
    has_vectors = any(vector is not None for vector in vectors)
    is_plain = epilogue.activation == "none" and not has_vectors
    if norm in _OF_ROWS and is_plain:
        config = PLAIN_ROWS_TRANSPOSED if want.transposed else PLAIN_ROWS
    else:
        config = {"none": NO_NORM_DEFAULT, "block": DEFAULT}.get(norm, ROW_DEFAULT)
    columns = min(_columns(norm, n), config.block_n)
    return dataclasses.replace(config, block_n=columns)


def _require_served(
    name: str,
    shape: tuple[int, int],
    norm: NormName,
    config: TuningConfig,
    *operands: Scaled | Array | None,
):
    """Raises ValueError or ImportError as the operations do."""
    reason = why_not(*shape, norm=norm, config=config)
    if reason is not None:
        raise ValueError(f"{name}: {reason}.")
    tail.check(name, *shape, *operands)


def _constants(epilogue: Epilogue, n: int, xhat_dtype: DTypeLike) -> dict:
    is_fp8 = jnp.dtype(xhat_dtype) == jnp.dtype(E4M3)
    return dict(
        norm=epilogue.norm,
        xhat_scale=1 / xhat_scale_inv(epilogue.norm, n) if is_fp8 else 1.0,
        activation=epilogue.activation,
    )
