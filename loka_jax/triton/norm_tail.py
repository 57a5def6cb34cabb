"""Norm, residual and activation after a product by Triton, in one pass each way.

    forward   xhat = norm(z + bias + r)    y = activation(xhat)
    backward  g = (d + r) activation'(xhat)    dz = rstd (g - xhat mean(g xhat))

A block norm's statistics are those of `NORM_BLOCK` columns, which one tile holds: rows
may have any length. y and dz are also written in FP8, as they are and transposed.
Without a norm, `dz = g`.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3
from loka_jax.normed import (
    NORM_BLOCK,
    XHAT_SCALE_INV,
    Epilogue,
    NormName,
    NormResiduals,
    norm_features,
)
from loka_jax.tails import Forms, NormTail, NormTailGradients, Scaled
from loka_jax.triton import tail
from loka_jax.triton.launch import power_of_two
from loka_jax.triton.tail import Arguments, TuningConfig

_MIN_COLUMNS = 16
CONFIGS = (
    TuningConfig(64, NORM_BLOCK, 16),
    TuningConfig(64, NORM_BLOCK, 8),
    TuningConfig(32, NORM_BLOCK, 8),
    TuningConfig(32, NORM_BLOCK, 4),
)
# The fastest on an H200 at 65,536 x 3,456, either way with a norm, of a cast without.
DEFAULT = TuningConfig(32, NORM_BLOCK, 8)
NO_NORM_DEFAULT = TuningConfig(64, 128, 4)


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
    if norm not in ("none", "block"):
        return f"norm {norm!r} takes statistics of whole rows"
    columns = _columns(norm, n)
    if config is not None and norm == "block" and config.block_n != columns:
        return f"{config} has tiles of {config.block_n} columns, not {columns}"
    return tail.why_not(m, n, *operands)


def norm_tail(
    z: Scaled,
    r: Float[Array, "m n"] | None = None,
    bias: Float[Array, "n"] | None = None,
    *,
    epilogue: Epilogue,
    want: Forms,
    y_scale_inv: Float[Array, ""] | None = None,
    xhat: DTypeLike | None = E4M3,
    config: TuningConfig | None = None,
) -> NormTail:
    """Returns `activation(norm(z + bias + r))` and what its backward pass reads.

    Args:
        z: the product.
        r: bfloat16 summand, or None.
        bias: float32; None if absent.
        epilogue: norm and activation; the norm is "block" or "none".
        want: the forms of y.
        y_scale_inv: scale of the FP8 form.
        xhat: dtype in which normalized rows are kept, E4M3 or bfloat16 (always
            bfloat16 without a norm); None to return no residuals.
        config: the tuning config; None for the default.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    m, n = want.shape_of(z.data)
    config = _served("norm_tail", (m, n), epilogue, config, z, r)
    operands = Arguments.of((m, n), want)
    operands.add_scaled("z", z)
    operands.add_matrix("r", r)
    operands.add("bias", bias)
    operands.add_forms(want, y_scale_inv)
    keep, is_norm = xhat is not None, epilogue.norm == "block"
    dtype = jnp.bfloat16 if xhat is None or not is_norm else xhat
    operands.constants.update(
        _constants(epilogue, dtype), has_residuals=keep, epsilon=epilogue.epsilon
    )
    from loka_jax.triton import norm_tail_kernel  # not above: it imports Triton

    blocks = -(-n // NORM_BLOCK)
    has_rstd, out_shape = keep and is_norm, operands.out_shape
    types = [
        *tail.result_types(out_shape, want, config),
        tail.optional_type(keep, out_shape, dtype),
        tail.optional_type(has_rstd, (blocks, m) if blocks > 1 else (m,), jnp.float32),
    ]
    *y, kept, rstd = tail.run(
        norm_tail_kernel.norm_tail_kernel, operands, types, config
    )
    residuals = NormResiduals(kept, rstd if has_rstd else None) if keep else None
    return NormTail(tail.written(y, want, y_scale_inv), residuals)


def norm_tail_backward(
    d: Scaled,
    r: Float[Array, "m n"] | None,
    residuals: NormResiduals,
    *,
    epilogue: Epilogue,
    want: Forms,
    dz_scale_inv: Float[Array, ""] | None = None,
    has_bias: bool = False,
    config: TuningConfig | None = None,
) -> NormTailGradients:
    """Returns the gradients of z and the bias, where y has the gradient `d + r`.

    Deterministic.

    Args:
        d: first summand of the gradient of y.
        r: second summand, bfloat16, or None.
        residuals, epilogue: of the forward pass. Without a norm, y in any of its forms
            serves the backward pass of relu, which reads only signs.
        want: the forms of dz.
        dz_scale_inv: scale of the FP8 form.
        has_bias: return the gradient of the bias.
        config: the tuning config; None for the default.

    Raises:
        ValueError: if these operands are not served (see `why_not`).
        ImportError: if jax-triton is not installed.
    """
    m, n = want.shape_of(d.data)
    xhat, rstd = residuals
    config = _served("norm_tail_backward", (m, n), epilogue, config, d, r, xhat)
    operands = Arguments.of((m, n), want)
    operands.add_scaled("d", d)
    operands.add_matrix("r", r)
    operands.add_matrix("xhat", xhat)
    operands.arrays.append(xhat if rstd is None else rstd)
    operands.add_forms(want, dz_scale_inv)
    operands.constants.update(_constants(epilogue, xhat.dtype), has_bias=has_bias)
    from loka_jax.triton import norm_tail_kernel

    types = [
        *tail.result_types(operands.out_shape, want, config),
        tail.optional_type(has_bias, (config.tiles_m(m), n), jnp.float32),
    ]
    kernel = norm_tail_kernel.norm_tail_backward_kernel
    *dz, dbias = tail.run(kernel, operands, types, config)
    return NormTailGradients(
        dz=tail.written(dz, want, dz_scale_inv),
        dbias=jnp.sum(dbias, axis=0) if has_bias else None,
    )


def _columns(norm: NormName, n: int) -> int:
    """Returns the columns of a tile that holds all that share a statistic."""
    return max(power_of_two(norm_features(norm, n)), _MIN_COLUMNS)


def _served(
    name: str,
    shape: tuple[int, int],
    epilogue: Epilogue,
    config: TuningConfig | None,
    *operands: Scaled | Array | None,
) -> TuningConfig:
    """Returns the config of a launch.

    Raises:
        ValueError, ImportError: as the operations do.
    """
    norm = epilogue.norm
    if config is None:
        config = NO_NORM_DEFAULT if norm == "none" else DEFAULT
        columns = min(_columns(norm, shape[1]), config.block_n)
        config = dataclasses.replace(config, block_n=columns)
    reason = why_not(*shape, norm=norm, config=config)
    if reason is not None:
        raise ValueError(f"{name}: {reason}.")
    tail.check(name, *shape, *operands)
    return config


def _constants(epilogue: Epilogue, xhat_dtype: DTypeLike) -> dict:
    is_fp8 = jnp.dtype(xhat_dtype) == jnp.dtype(E4M3)
    return dict(
        is_norm=epilogue.norm == "block",
        xhat_scale=1 / XHAT_SCALE_INV if is_fp8 else 1.0,
        activation=epilogue.activation,
    )
