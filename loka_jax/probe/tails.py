"""How heavy the tails of an operand are, and what an FP8 cast does to its ends.

Of all elements together, with central moments that merge (Pebay 2008):

    kurtosis = n M4 / M2^2            3 for a Gaussian
    underflow, saturation rate        shares flushed to zero, and clipped
    amax ratio                        amax now / amax that the scale was made for
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import Fp8Array


class Tails(NamedTuple):
    """What is known of all elements seen so far, float32 scalars.

    Attributes:
        count: elements.
        mean: of them.
        m2, m4: sums of the second and fourth powers about the mean.
        m3: of the third.
        amax: the largest magnitude.
        last_amax: that of the last batch, or microbatch.
        flushed: elements that are not zero, but are in FP8.
        clipped: elements beyond the largest magnitude of their scale.
        amax_ratio: the last batch's amax, divided by the one that the scale it was cast
            with was made for; 0 before any cast.
    """

    count: Float[Array, ""]
    mean: Float[Array, ""]
    m2: Float[Array, ""]
    m3: Float[Array, ""]
    m4: Float[Array, ""]
    amax: Float[Array, ""]
    last_amax: Float[Array, ""]
    flushed: Float[Array, ""]
    clipped: Float[Array, ""]
    amax_ratio: Float[Array, ""]

    @property
    def kurtosis(self) -> Float[Array, ""]:
        """`n M4 / M2^2`; 0 where nothing varies."""
        safe = jnp.where(self.m2 > 0, self.m2, 1.0)
        return jnp.where(self.m2 > 0, self.count * (self.m4 / safe) / safe, 0.0)

    @property
    def underflow_rate(self) -> Float[Array, ""]:
        """The share of elements flushed to zero."""
        return self.flushed / jnp.maximum(self.count, 1)

    @property
    def saturation_rate(self) -> Float[Array, ""]:
        """The share of elements clipped."""
        return self.clipped / jnp.maximum(self.count, 1)


def no_tails() -> Tails:
    """Returns the tails of no elements."""
    return Tails(*jnp.zeros((len(Tails._fields),), jnp.float32))


def tails_of(x: Float[Array, "..."], cast: Fp8Array | None = None) -> Tails:
    """Returns the tails of an array, and if it was cast, what that did to it.

    Args:
        x: the array.
        cast: its FP8 form, with scales that broadcast against it.
    """
    x = x.astype(jnp.float32)
    mean = jnp.mean(x)
    off = x - mean
    square = off * off
    amax = fp8.amax(x)
    flushed = clipped = ratio = jnp.zeros((), jnp.float32)
    if cast is not None:
        limit = fp8.fp8_max(cast.data.dtype)
        reach = limit * jnp.broadcast_to(cast.scale_inv, x.shape)
        flushed = jnp.sum((x != 0) & (cast.data.astype(jnp.float32) == 0))
        clipped = jnp.sum(jnp.abs(x) > reach)
        ratio = amax / jnp.max(reach)
    return Tails(
        count=jnp.float32(x.size),
        mean=mean,
        m2=jnp.sum(square),
        m3=jnp.sum(square * off),
        m4=jnp.sum(square * square),
        amax=amax,
        last_amax=amax,
        flushed=flushed.astype(jnp.float32),
        clipped=clipped.astype(jnp.float32),
        amax_ratio=ratio,
    )


def merge(a: Tails, b: Tails) -> Tails:
    """Returns the tails of the elements of both; `b` is the later one."""
    n = jnp.maximum(a.count + b.count, 1)
    p, q = a.count / n, b.count / n
    d = b.mean - a.mean
    m2 = a.m2 + b.m2 + n * p * q * d**2
    m3 = a.m3 + b.m3 + n * p * q * (p - q) * d**3 + 3 * d * (p * b.m2 - q * a.m2)
    m4 = a.m4 + b.m4 + n * p * q * (p * p - p * q + q * q) * d**4
    m4 += 6 * d**2 * (p * p * b.m2 + q * q * a.m2) + 4 * d * (p * b.m3 - q * a.m3)
    return Tails(
        count=a.count + b.count,
        mean=a.mean + q * d,
        m2=m2,
        m3=m3,
        m4=m4,
        amax=jnp.maximum(a.amax, b.amax),
        last_amax=jnp.where(b.count > 0, b.last_amax, a.last_amax),
        flushed=a.flushed + b.flushed,
        clipped=a.clipped + b.clipped,
        amax_ratio=jnp.where(b.count > 0, b.amax_ratio, a.amax_ratio),
    )


def update(tails: Tails, x: Float[Array, "..."], cast: Fp8Array | None = None) -> Tails:
    """Returns the tails with one array more; one that is not finite adds nothing."""
    if x.size == 0:
        return tails
    merged = merge(tails, tails_of(x, cast))
    is_finite = jnp.all(jnp.isfinite(jnp.stack(merged)))
    return jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), merged, tails)


def merge_over_devices(tails: Tails, axis_names: tuple[str, ...]) -> Tails:
    """Returns the tails of the elements of all devices along some mesh axes."""
    if not axis_names:
        return tails
    gathered = jax.lax.all_gather(jnp.stack(tails), axis_names)
    parts = [Tails(*part) for part in gathered.reshape(-1, len(tails))]
    ratio = jnp.max(jnp.stack([part.amax_ratio for part in parts]))
    merged = functools.reduce(merge, parts)
    return merged._replace(amax_ratio=ratio, last_amax=merged.amax)
