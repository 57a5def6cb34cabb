"""What a site with a norm computes, in plain float32 JAX, for JAX to differentiate.

Written from the equations, not from the library's code: two passes for a variance, one
block after the other.
"""

import jax
import jax.numpy as jnp

from tests import support

NORMS = ("none", "layer", "rms", "block")
ACTIVATIONS = ("none", "relu", "swish", "hard_swish", "gelu")

_ACTIVATE = {
    "none": lambda u: u,
    "relu": lambda u: jnp.where(u > 0, u, 0),
    "swish": lambda u: u / (1 + jnp.exp(-u)),
    "hard_swish": lambda u: u * jnp.clip((u + 3) / 6, 0, 1),
    "gelu": lambda u: (
        u / 2 * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (u + 0.044715 * u**3)))
    ),
}


def activate(u, activation):
    return _ACTIVATE[activation](u)


def normalize(z, norm, epsilon=1e-6):
    if norm == "none":
        return z
    if norm == "block":
        parts = [z[:, i : i + 256] for i in range(0, z.shape[1], 256)]
        return jnp.concatenate([normalize(p, "rms", epsilon) for p in parts], 1)
    if norm == "layer":
        z = z - jnp.mean(z, 1, keepdims=True)
    return z / jnp.sqrt(jnp.mean(z**2, 1, keepdims=True) + epsilon)


def site(lhs, rhs, vectors, norm, activation, epsilon=1e-6):
    """Returns `activation(gamma norm(lhs @ rhs + bias) + beta)` in float32."""
    with jax.default_matmul_precision("float32"):
        z = lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)
    return after_product(z, vectors, norm, activation, epsilon)


def after_product(z, vectors, norm, activation, epsilon=1e-6):
    """Returns `activation(gamma norm(z + bias) + beta)`."""
    if "bias" in vectors:
        z = z + vectors["bias"][None]
    u = normalize(z, norm, epsilon)
    if "gamma" in vectors:
        u = u * vectors["gamma"][None]
    if "beta" in vectors:
        u = u + vectors["beta"][None]
    return activate(u, activation)


def vectors(n, norm, *, with_bias=False):
    """Returns the parameters that a site with this norm has."""
    names = {"layer": ["gamma", "beta"], "rms": ["gamma"]}.get(norm, [])
    if with_bias:
        names = [*names, "bias"]
    centre = {"gamma": 1.0}
    return {
        name: centre.get(name, 0.0) + 0.3 * support.normal(n, seed=10 + i)
        for i, name in enumerate(names)
    }
