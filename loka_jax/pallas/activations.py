"""Activations on register tiles, written for the GPU's instructions.

The sigmoid is computed by `tanh`, a single instruction on Hopper unlike `exp` and a
division: `u * sigmoid(u) = h + h tanh(h)` with `h = u / 2`. So the sigmoid, swish and
GELU (the tanh form, the default of `jax.nn.gelu`) take u / 2, a factor that kernels
fold into a multiplication they do anyway.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.normed import ActivationName

_GELU_LINEAR = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


def why_not(name: ActivationName) -> str | None:
    """Returns why an activation is not served, or None if it is."""
    return f"Mosaic GPU has no erf, as {name} needs" if name == "exact_gelu" else None


def input_scale(name: ActivationName) -> float:
    """Returns the factor of the argument of `activate_scaled` and `slope_scaled`."""
    return 0.5 if name in ("swish", "gelu", "sigmoid") else 1.0


def activate_scaled(
    name: ActivationName, v: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns the activation of `v / input_scale(name)`, in the dtype of `v`."""
    match name:
        case "none":
            return v
        case "relu":
            return jnp.maximum(v, 0.0)
        case "swish":
            return v + v * jnp.tanh(v)
        case "hard_swish":
            return v * jnp.minimum(jnp.maximum(v * (1 / 6) + 0.5, 0.0), 1.0)
        case "gelu":
            return v + v * jnp.tanh(v * (2 * _GELU_LINEAR + 8 * _GELU_CUBIC * v * v))
        case "tanh":
            return jnp.tanh(v)
        case "sigmoid":
            return 0.5 + 0.5 * jnp.tanh(v)
    raise ValueError(f"unknown activation {name!r}.")


def slope_scaled(
    name: ActivationName, v: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns the derivative of the activation at `v / input_scale(name)`."""
    match name:
        case "none":
            return jnp.ones_like(v)
        case "relu":
            return jnp.where(v > 0.0, 1.0, 0.0)
        case "swish":  # s + u s (1 - s), s the sigmoid of u
            t = jnp.tanh(v)
            s = 0.5 + 0.5 * t
            return s + v * (s - s * t)
        case "hard_swish":  # 0 below -3, 1 above 3, (2 u + 3) / 6 between
            between = v * (1 / 3) + 0.5
            return jnp.where(v > 3.0, 1.0, jnp.where(v < -3.0, 0.0, between))
        case "gelu":
            t = jnp.tanh(v * (2 * _GELU_LINEAR + 8 * _GELU_CUBIC * v * v))
            inner = _GELU_LINEAR + 12 * _GELU_CUBIC * v * v
            return 0.5 + 0.5 * t + v * (1.0 - t * t) * inner
        case "tanh":
            t = jnp.tanh(v)
            return 1.0 - t * t
        case "sigmoid":
            t = jnp.tanh(v)
            return 0.25 - 0.25 * t * t
    raise ValueError(f"unknown activation {name!r}.")
