"""Norm and activation by XLA: they serve every site, and are the kernels' reference.

    z = x W^T + bias        xhat = norm(z)        y = activation(gamma xhat + beta)

`norm_activation` is differentiable by JAX. `dense_norm` and `norm_backward` have the
signatures of the kernels of these names, without tuning configs; `norm_backward` also
serves sites whose backward pass has no kernel.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import E4M3, Fp8Array
from loka_jax.normed import (
    NO_VECTORS,
    NORM_BLOCK,
    ActivationName,
    Epilogue,
    Normed,
    NormName,
    NormResiduals,
    NormVectors,
    Outputs,
    xhat_scale_inv,
)
from loka_jax.xla.matmul import fp8_matmul, high_precision_matmul

ACTIVATIONS: dict[ActivationName, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "swish": jax.nn.swish,
    "hard_swish": jax.nn.hard_swish,  # x * relu6(x + 3) / 6
    "gelu": jax.nn.gelu,
    "exact_gelu": functools.partial(jax.nn.gelu, approximate=False),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def norm_activation(
    z: Float[Array, "m n"], vectors: NormVectors = NO_VECTORS, *, epilogue: Epilogue
) -> Float[Array, "m n"]:
    """Returns float32 `activation(gamma norm(z + bias) + beta)`, differentiable."""
    xhat, _ = normalize(plus(z.astype(jnp.float32), vectors.bias), epilogue)
    return ACTIVATIONS[epilogue.activation](affine(xhat, vectors))


def dense_norm(
    x: Float[Array, "m k"] | Fp8Array,
    w: Float[Array, "n k"] | Fp8Array,
    vectors: NormVectors = NO_VECTORS,
    *,
    epilogue: Epilogue,
    want: Outputs,
    y_scale_inv: Float[Array, ""] | None = None,
) -> Normed:
    """Returns the outputs of the forward kernel, computed in float32 before casts."""
    z = plus(_product(x, w, jnp.float32), vectors.bias)
    xhat, rstd = normalize(z, epilogue)
    y = ACTIVATIONS[epilogue.activation](affine(xhat, vectors))
    y_fp8 = None
    if want.y_fp8 == "rowwise":
        y_fp8 = fp8.quantize(y, E4M3, axes=(1,))
    elif want.y_fp8 == "tensorwise":
        assert y_scale_inv is not None
        y_fp8 = fp8.cast(y, y_scale_inv, E4M3)
    if want.xhat == E4M3:
        scale_inv = xhat_scale_inv(epilogue.norm, z.shape[1])
        xhat = fp8.saturate(xhat / scale_inv, E4M3)
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
    residuals: NormResiduals,
    vectors: NormVectors = NO_VECTORS,
    *,
    epilogue: Epilogue,
) -> tuple[Float[Array, "m n"], Float[Array, "n"] | None, Float[Array, "n"] | None]:
    """Returns the float32 gradients of z, gamma and beta.

    With du = dy activation'(u) and g = gamma du:

        dz = rstd (g - mean(g) - xhat mean(g xhat))     without mean(g) if norm is rms
    """
    norm, (_, gamma, beta) = epilogue.norm, vectors
    xhat, rstd = decode_xhat(residuals.xhat, norm), residuals.rstd
    u = affine(xhat, vectors)
    _, pull = jax.vjp(ACTIVATIONS[epilogue.activation], u)
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


def normalize(
    z: Float[Array, "m n"], epilogue: Epilogue
) -> tuple[Float[Array, "m n"], Float[Array, "..."] | None]:
    """Returns the normalized rows of a float32 matrix, and rstd as in `Normed`."""
    if epilogue.norm == "none":
        return z, None
    parts, rates = _blocks(z, epilogue.norm), []
    for i, part in enumerate(parts):
        moment = _mean(part * part)
        if epilogue.norm == "layer":
            # In one pass over the row, as in Flax's LayerNorm; rounding may make the
            # difference negative.
            mean = _mean(part)
            part, moment = part - mean, jnp.maximum(moment - mean * mean, 0.0)
        rates.append(jax.lax.rsqrt(moment + epilogue.epsilon))
        parts[i] = part * rates[i]
    rstd = jnp.concatenate([rate[:, :, 0] for rate in rates], axis=1)
    return _joined(parts), rstd[:, 0] if rstd.shape[1] == 1 else rstd.T


def _blocks(x: Array, norm: NormName) -> list[Array]:
    """Returns `x` as (rows, blocks, columns) parts, with one statistic per block."""
    m, n = x.shape
    if norm != "block" or n <= NORM_BLOCK:
        return [x[:, None, :]]
    rest = n % NORM_BLOCK
    parts = [x[:, : n - rest].reshape(m, n // NORM_BLOCK, NORM_BLOCK)]
    return [*parts, x[:, None, n - rest :]] if rest else parts


def _joined(parts: list[Array]) -> Array:
    """Returns the rows whose blocks are `parts`."""
    flat = [p.reshape(p.shape[0], p.shape[1] * p.shape[2]) for p in parts]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)


def _mean(x: Array) -> Array:
    return jnp.mean(x, axis=-1, keepdims=True)


def plus(z: Array, bias: Array | None) -> Array:
    """Returns z with a bias on each row, if there is one."""
    return z if bias is None else z + bias[None, :]


def affine(xhat: Float[Array, "m n"], vectors: NormVectors) -> Float[Array, "m n"]:
    """Returns `gamma xhat + beta`, of those that are given."""
    gamma = vectors.gamma
    u = xhat if gamma is None else xhat * gamma[None, :]
    return plus(u, vectors.beta)


def decode_xhat(xhat: Array, norm: NormName) -> Array:
    """Returns the stored normalized rows in float32."""
    is_fp8 = xhat.dtype == E4M3
    scale_inv = xhat_scale_inv(norm, xhat.shape[1]) if is_fp8 else 1.0
    return xhat.astype(jnp.float32) * scale_inv


def _product(x: Array | Fp8Array, w: Array | Fp8Array, out_dtype) -> Array:
    """Returns `x @ w.T` of operands that are both in FP8 or both in high precision."""
    if isinstance(x, Fp8Array):
        assert isinstance(w, Fp8Array)
        return fp8_matmul(x, w, out_dtype=out_dtype)
    assert not isinstance(w, Fp8Array)
    return high_precision_matmul(x, w, compute_dtype=w.dtype, out_dtype=out_dtype)
