"""Error measures of a low-precision array against its reference, as Probe reports them.

All functions take the reference first, compute in float32 and return float32 scalars.
A global norm hides flushed rows (an array whose small rows all became zero can have
31 dB), so look at `worst_row` beside `sqnr`.
"""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Float

# By which products are judged.
Measure = Literal["relative_l2", "worst_row", "mere"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


def sqnr(ref: Float[Array, "*s"], x: Float[Array, "*s"]) -> Float[Array, ""]:
    """Returns the signal-to-quantization-noise ratio in dB.

    `10 log10(sum ref^2 / sum (ref - x)^2)`; infinite if the arrays are equal.
    """
    signal, noise = _signal_and_noise(ref, x, axis=None)
    return jnp.where(noise == 0, jnp.inf, 10 * jnp.log10(signal / noise))


def worst_row(ref: Float[Array, "*s n"], x: Float[Array, "*s n"]) -> Float[Array, ""]:
    """Returns the largest relative L2 of a row that is not all zero."""
    signal, noise = _signal_and_noise(ref, x, axis=-1)
    relative = jnp.where(signal == 0, 0.0, noise / jnp.where(signal == 0, 1.0, signal))
    # XLA's maximum would lose a NaN in large reductions on CPUs.
    return jnp.sqrt(jnp.max(relative)) + 0.0 * jnp.sum(noise)


def relative_l2(ref: Float[Array, "*s"], x: Float[Array, "*s"]) -> Float[Array, ""]:
    """Returns `||ref - x|| / ||ref||`: 0.037 for a healthy E4M3 x E4M3 product."""
    signal, noise = _signal_and_noise(ref, x, axis=None)
    return jnp.where(noise == 0, 0.0, jnp.sqrt(noise / signal))


def mere(ref: Float[Array, "*s"], x: Float[Array, "*s"]) -> Float[Array, ""]:
    """Returns the mean element-wise relative error, `mean |x - ref| / |ref|`.

    Elements with `ref = 0` are left out. The mean is heavy-tailed: near-zero elements
    dominate it, so it is 0.3 to 0.7 where `relative_l2` is 0.037. If values
    have a density at 0, it has no mean over draws (`P(ratio > t) ~ 1 / t`): it grows
    with the number of elements, and no interval holds it at its rate.

    References:
        LoKA, arXiv 2605.10886, section on Probe.
    """
    ref, x = ref.astype(jnp.float32), x.astype(jnp.float32)
    counted = ref != 0
    error = jnp.abs(x - ref) / jnp.where(counted, jnp.abs(ref), 1.0)
    count = jnp.sum(counted.astype(jnp.float32))
    return jnp.sum(jnp.where(counted, error, 0.0)) / jnp.maximum(count, 1)


def _signal_and_noise(ref, x, *, axis):
    """Returns `sum ref^2` and `sum (ref - x)^2`, in units of the largest `ref^2`."""
    ref, x = ref.astype(jnp.float32), x.astype(jnp.float32)
    # Without the unit, squares of small gradients would underflow in float32.
    unit = jnp.max(jnp.abs(ref), axis=axis, keepdims=True, initial=0)
    unit = jnp.where(unit == 0, 1.0, unit)
    signal = jnp.sum((ref / unit) ** 2, axis=axis)
    return signal, jnp.sum(((ref - x) / unit) ** 2, axis=axis)
