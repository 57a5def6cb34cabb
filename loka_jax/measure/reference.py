"""The equations of a site in plain float32 JAX: the reference of tests and benchmarks.

They are those of `loka_jax.normed`, independent of the providers, as a user of JAX
would write them: a variance takes two passes over a row, and a block norm normalizes
one block after another. All functions can be differentiated.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.fp8 import E4M3
from loka_jax.normed import (
    NORM_BLOCK,
    Epilogue,
    NormResiduals,
    NormVectors,
    xhat_scale_inv,
)
from loka_jax.xla import ACTIVATIONS


def norm_activation(
    z: Float[Array, "m n"], vectors: NormVectors, epilogue: Epilogue
) -> Float[Array, "m n"]:
    """Returns `activation(gamma norm(z + bias) + beta)`."""
    z = z.astype(jnp.float32)
    if vectors.bias is not None:
        z = z + vectors.bias[None, :]
    xhat, _ = normalize(z, epilogue)
    return ACTIVATIONS[epilogue.activation](_affine(xhat, vectors))


def normalize(
    z: Float[Array, "m n"], epilogue: Epilogue
) -> tuple[Float[Array, "m n"], Float[Array, "..."] | None]:
    """Returns the normalized rows, and rstd as `normed.Normed` has it."""
    norm, epsilon = epilogue.norm, epilogue.epsilon
    if norm == "none":
        return z, None
    if norm == "block" and z.shape[1] > NORM_BLOCK:
        xhats, rstds = zip(*(normalize(x, epilogue) for x in _blocks(z)), strict=True)
        return jnp.concatenate(xhats, axis=1), jnp.stack(rstds)
    if norm == "layer":
        z = z - jnp.mean(z, axis=1, keepdims=True)
    rstd = jax.lax.rsqrt(jnp.mean(z**2, axis=1) + epsilon)
    return z * rstd[:, None], rstd


def norm_backward(
    dy: Float[Array, "m n"],
    residuals: NormResiduals,
    vectors: NormVectors,
    epilogue: Epilogue,
) -> tuple[Float[Array, "m n"], Float[Array, "n"] | None, Float[Array, "n"] | None]:
    """Returns the gradients of z, gamma and beta from what the forward pass keeps."""
    dy, xhat = dy.astype(jnp.float32), residuals.xhat.astype(jnp.float32)
    if residuals.xhat.dtype == E4M3:
        xhat = xhat * xhat_scale_inv(epilogue.norm, xhat.shape[1])
    u = _affine(xhat, vectors)
    (du,) = jax.vjp(ACTIVATIONS[epilogue.activation], u)[1](dy)
    g = du if vectors.gamma is None else du * vectors.gamma[None, :]
    dz = _norm_gradient(g, xhat, residuals.rstd, epilogue)
    dgamma = None if vectors.gamma is None else jnp.sum(du * xhat, axis=0)
    dbeta = None if vectors.beta is None else jnp.sum(du, axis=0)
    return dz, dgamma, dbeta


def _norm_gradient(g: Array, xhat: Array, rstd: Array | None, epilogue: Epilogue):
    """Returns the gradient of z from that of xhat."""
    if rstd is None:
        return g
    if rstd.ndim == 2:
        parts = zip(_blocks(g), _blocks(xhat), rstd, strict=True)
        gradients = [_norm_gradient(*part, epilogue) for part in parts]
        return jnp.concatenate(gradients, axis=1)
    dz = g - xhat * jnp.mean(g * xhat, axis=1, keepdims=True)
    if epilogue.norm == "layer":
        dz = dz - jnp.mean(g, axis=1, keepdims=True)
    return dz * rstd[:, None]


def _affine(xhat: Array, vectors: NormVectors) -> Array:
    u = xhat if vectors.gamma is None else xhat * vectors.gamma[None, :]
    return u if vectors.beta is None else u + vectors.beta[None, :]


def _blocks(x: Array) -> list[Array]:
    return jnp.split(x, list(range(NORM_BLOCK, x.shape[1], NORM_BLOCK)), axis=1)
