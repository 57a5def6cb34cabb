"""Powers of two stored such that sums and means of them read as the largest.

JAX adds up the gradients of several uses of a variable; training loops average them
over microbatches, devices or steps, and divide all of them by a number. None of that
is to change what is read. A power of two x in the band below 2^b is stored as

    u = x / 2^b        v = u^2

and as zeros in the entries of the other bands. For numbers in one band with positive
weights w, the ratio

    sum(w v) / sum(w u) = sum(w x^2) / sum(w x) / 2^b

is at most the largest x / 2^b. With equal weights it is more than half of that for up
to eight numbers, and the next power of two is exact; of a hundred, one that is alone
above all others may be read at a fourth. A factor cancels.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from loka_jax.fp8 import power_of_two_up

_WIDTH = 40  # exponents in a band: u^2, a weight and a user's factor stay normal
_TOPS = np.arange(-38, 123, _WIDTH)  # b of each band
ENTRIES = 2 * len(_TOPS)
SMALLEST, LARGEST = 2.0 ** (int(_TOPS[0]) - _WIDTH), 2.0 ** int(_TOPS[-1] - 1)
# What a rounding of u and v to bfloat16 may add to their ratio, and more.
_SLACK = 1 - 2.0**-6


def encode(x: Float[Array, "*s 1"]) -> Float[Array, "*s entries"]:
    """Returns the entries of powers of two; those of 0 are 0.

    Others than 0 are brought into the range from `SMALLEST` to `LARGEST`.
    """
    x = jnp.where(x > 0, jnp.clip(x, SMALLEST, LARGEST), 0.0)
    tops = np.exp2(np.tile(_TOPS, 2).astype(np.float32))
    tops = tops.reshape([1] * (x.ndim - 1) + [ENTRIES])
    is_square = np.arange(ENTRIES).reshape(tops.shape) >= len(_TOPS)
    # In one expression of x, so that XLA computes x where it is used.
    u = jnp.where((x >= tops * 2.0**-_WIDTH) & (x < tops), x, 0.0) * (1 / tops)
    return jnp.where(is_square, u * u, u)


def decode(entries: Float[Array, "*s entries"]) -> Float[Array, "*s 1"]:
    """Returns the largest of the powers of two that were summed; 0 if all were 0."""
    # Column by column, not by reductions: XLA then fuses all of it with its neighbours.
    columns = jnp.split(entries, ENTRIES, axis=-1)
    u, *us = columns[: len(_TOPS)]
    v, *vs = columns[len(_TOPS) :]
    top = jnp.full_like(u, 2.0 ** int(_TOPS[0]))
    for b, more_u, more_v in zip(_TOPS[1:], us, vs, strict=True):
        is_higher = more_u > 0
        top = jnp.where(is_higher, 2.0 ** int(b), top)
        u = jnp.where(is_higher, more_u + u * 2.0**-_WIDTH, u)
        v = jnp.where(is_higher, more_v + v * 2.0 ** (-2 * _WIDTH), v)
    is_any = (u > 0) & (v > 0)
    ratio = jnp.where(is_any, v, 1.0) / jnp.where(is_any, u, 1.0)
    return jnp.where(is_any, power_of_two_up(ratio * _SLACK) * top, 0.0)


def is_sum(entries: Float[Array, "*s entries"]) -> Bool[Array, "*s 1"]:
    """Returns whether entries may be such a sum: none is negative, all are finite."""
    columns = jnp.split(entries, ENTRIES, axis=-1)
    least = functools.reduce(jnp.minimum, columns)
    return (least >= 0) & (functools.reduce(jnp.add, columns) < jnp.inf)
