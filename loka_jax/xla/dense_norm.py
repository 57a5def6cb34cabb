"""Norm and activation by XLA: the route that always works, and what kernels must match.

    z = x W^T + bias        xhat = norm(z)        y = activation(gamma xhat + beta)

`norm_activation` is differentiable by JAX. `dense_norm` and `dense_norm_backward` take
and return what the kernels of that name do: they are their reference, and
`norm_backward` serves where a kernel has no backward.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    NORM_BLOCK,
    XHAT_SCALE_INV,
    ActivationName,
    Normed,
    NormName,
    Outputs,
)
from loka_jax.xla.matmul import fp8_matmul, high_precision_matmul

ACTIVATIONS: dict[ActivationName, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "swish": jax.nn.swish,
    "hard_swish": jax.nn.hard_swish,  # x * relu6(x + 3) / 6
    "gelu": jax.nn.gelu,
}


def norm_activation(
    z: Float[Array, "m n"],
    *,
    bias: Float[Array, "n"] | None = None,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName,
    epsilon: float = 1e-6,
) -> Float[Array, "m n"]:
    """Returns float32 `activation(gamma norm(z + bias) + beta)`, differentiable."""
    xhat, _ = _normalize(_plus(z.astype(jnp.float32), bias), norm, epsilon)
    return ACTIVATIONS[activation](_affine(xhat, gamma, beta))


def dense_norm(
    x: Float[Array, "m k"] | Fp8Array,
    w: Float[Array, "n k"] | Fp8Array,
    *,
    bias: Float[Array, "n"] | None = None,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName,
    epsilon: float = 1e-6,
    want: Outputs,
    y_scale_inv: Float[Array, ""] | None = None,
) -> Normed:
    """Returns what the forward kernel does, all of it in float32 until it is cast."""
    z = _plus(_product(x, w, jnp.float32), bias)
    xhat, rstd = _normalize(z, norm, epsilon)
    y = ACTIVATIONS[activation](_affine(xhat, gamma, beta))
    y_fp8 = None
    if want.y_fp8 == "rowwise":
        y_fp8 = fp8.quantize(y, E4M3, axes=(1,))
    elif want.y_fp8 == "tensorwise":
        assert y_scale_inv is not None
        y_fp8 = fp8.cast(y, y_scale_inv, E4M3)
    if want.xhat == E4M3:
        xhat = fp8.saturate(xhat / XHAT_SCALE_INV, E4M3)
    elif want.xhat is not None:
        xhat = xhat.astype(want.xhat)
    return Normed(
        y=y.astype(jnp.bfloat16) if want.y else None,
        y_fp8=y_fp8,
        xhat=xhat if want.xhat is not None else None,
        rstd=rstd if want.rstd else None,
        y_amax=fp8.amax(y, axes=(1,)).T if want.y_amax else None,
    )


def norm_backward(
    dy: Float[Array, "m n"],
    xhat: Float[Array, "m n"],
    rstd: Float[Array, "..."] | None,
    *,
    gamma: Float[Array, "n"] | None = None,
    beta: Float[Array, "n"] | None = None,
    norm: NormName,
    activation: ActivationName,
) -> tuple[Float[Array, "m n"], Float[Array, "n"] | None, Float[Array, "n"] | None]:
    """Returns float32 gradients of z, gamma and beta, from what the forward pass kept.

    With du = dy activation'(u) and g = gamma du:

        dz = rstd (g - mean(g) - xhat mean(g xhat))     without mean(g) if norm is rms

    Args:
        dy: gradient of the activations.
        xhat: bfloat16, or E4M3 to be multiplied by `XHAT_SCALE_INV`.
        rstd: as in `Normed`; None without a norm.
        gamma, beta: as in the forward pass.
        norm, activation: as in the forward pass.
    """
    xhat = _decode_xhat(xhat)
    u = _affine(xhat, gamma, beta)
    _, pull = jax.vjp(ACTIVATIONS[activation], u)
    (du,) = pull(dy.astype(jnp.float32))
    dgamma = None if gamma is None else jnp.sum(du * xhat, axis=0)
    dbeta = None if beta is None else jnp.sum(du, axis=0)
    g = du if gamma is None else du * gamma[None, :]
    if norm == "none":
        return g, dgamma, dbeta
    assert rstd is not None
    rate = rstd.reshape(-1, dy.shape[0]).T  # [M, blocks]
    dz = []
    for g_part, xhat_part in zip(_blocks(g, norm), _blocks(xhat, norm), strict=True):
        part_rate, rate = jnp.split(rate, [g_part.shape[1]], axis=1)
        centred = g_part - _mean(g_part) if norm == "layer" else g_part
        along = xhat_part * _mean(g_part * xhat_part)
        dz.append(part_rate[:, :, None] * (centred - along))
    return _joined(dz), dgamma, dbeta


def _normalize(z: Array, norm: NormName, epsilon: float) -> tuple[Array, Array | None]:
    """Returns the normalized rows and the reciprocal deviations."""
    if norm == "none":
        return z, None
    parts, rates = _blocks(z, norm), []
    for i, part in enumerate(parts):
        moment = _mean(part * part)
        if norm == "layer":
            # In one pass over the row, as Flax's LayerNorm. Rounding may leave less
            # than nothing.
            mean = _mean(part)
            part, moment = part - mean, jnp.maximum(moment - mean * mean, 0.0)
        rates.append(jax.lax.rsqrt(moment + epsilon))
        parts[i] = part * rates[i]
    rstd = jnp.concatenate([rate[:, :, 0] for rate in rates], axis=1)
    return _joined(parts), rstd[:, 0] if rstd.shape[1] == 1 else rstd.T


def _blocks(x: Array, norm: NormName) -> list[Array]:
    """Returns `x` as (rows, blocks, columns) parts, a statistic for each block."""
    m, n = x.shape
    if norm != "block" or n <= NORM_BLOCK:
        return [x[:, None, :]]
    rest = n % NORM_BLOCK
    parts = [x[:, : n - rest].reshape(m, n // NORM_BLOCK, NORM_BLOCK)]
    return [*parts, x[:, None, n - rest :]] if rest else parts


def _joined(parts: list[Array]) -> Array:
    """Returns the rows of which `parts` are the blocks."""
    flat = [p.reshape(p.shape[0], p.shape[1] * p.shape[2]) for p in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)


def _mean(x: Array) -> Array:
    return jnp.mean(x, axis=-1, keepdims=True)


def _plus(z: Array, bias: Array | None) -> Array:
    return z if bias is None else z + bias[None, :]


def _affine(xhat: Array, gamma: Array | None, beta: Array | None) -> Array:
    u = xhat if gamma is None else xhat * gamma[None, :]
    return _plus(u, beta)


def _decode_xhat(xhat: Array) -> Array:
    """Returns the kept normalized rows in float32."""
    scale_inv = XHAT_SCALE_INV if xhat.dtype == E4M3 else 1.0
    return xhat.astype(jnp.float32) * scale_inv


def _product(x: Array | Fp8Array, w: Array | Fp8Array, out_dtype) -> Array:
    """Returns `x @ w.T` of operands that are both in FP8 or both wide."""
    if isinstance(x, Fp8Array):
        assert isinstance(w, Fp8Array)
        return fp8_matmul(x, w, out_dtype=out_dtype)
    assert not isinstance(w, Fp8Array)
    return high_precision_matmul(x, w, compute_dtype=w.dtype, out_dtype=out_dtype)
