"""Statistics of an operand's elements, and the effect of an FP8 cast on its extremes.

Over all elements, by central moments that can be merged (Pebay 2008):

    kurtosis = n M4 / M2^2            3 for a Gaussian
    underflow, saturation rate        shares flushed to zero, and clipped
    amax ratio                        amax now / amax that the scale was made for

All are stored in one vector: each separate array would cost a kernel or two inside a
training step, and time to pass it in and out of every step.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax import fp8
from loka_jax.fp8 import Fp8Array

_FIELDS = (
    *("count", "mean", "m2", "m3", "m4"),
    *("amax", "last_amax", "flushed", "clipped", "amax_ratio"),
)
_ADDED = "count", "m2", "m3", "m4", "flushed", "clipped"  # over uses of a site
# A variance below this share of the mean square is rounding error.
_NO_VARIANCE = 1e-6


class Elements(NamedTuple):
    """Statistics of all elements seen so far, in the order of `_FIELDS`."""

    values: Float[Array, "10"]

    @property
    def count(self) -> Float[Array, ""]:
        """The number of elements."""
        return self.values[0]

    @property
    def mean(self) -> Float[Array, ""]:
        """The mean of all elements."""
        return self.values[1]

    def read(self) -> dict[str, Float[Array, "*layers"]]:
        """Returns the statistics by name, of a stack of layers those of each.

        mean, deviation, kurtosis (0 if the variance is), amax; last_amax, of the last
        batch or microbatch; underflow, saturation: the shares of elements that become
        zero only in FP8, and that are beyond what the scale allows; amax_ratio: the
        last batch's amax over the one that its scale was made for.
        """
        values = jnp.moveaxis(self.values, -1, 0)
        count, mean, m2, _, m4, amax, last_amax, flushed, clipped, ratio = values
        safe, least = jnp.where(m2 > 0, m2, 1.0), jnp.maximum(count, 1)
        return {
            "mean": mean,
            "deviation": jnp.sqrt(m2 / least),
            "kurtosis": jnp.where(m2 > 0, count * (m4 / safe) / safe, 0.0),
            "amax": amax,
            "last_amax": last_amax,
            "amax_ratio": ratio,
            "underflow": flushed / least,
            "saturation": clipped / least,
        }


def empty_elements() -> Elements:
    """Returns the statistics of no elements."""
    return Elements(jnp.zeros((len(_FIELDS),), jnp.float32))


def elements_of(
    x: Float[Array, "m k"],
    cast: Fp8Array,
    *,
    centre: Float[Array, ""] | float = 0.0,
    axis_names: tuple[str, ...] = (),
) -> Elements:
    """Returns the statistics of a non-empty array, and the effects of its cast.

    Args:
        centre: the point about which powers are summed: near the mean, if the mean is
            many standard deviations from zero.
        axis_names: mesh axes over which the rows of the array are spread.
    """
    count = jax.lax.psum(jnp.float32(x.size), axis_names)
    deviation = x.astype(jnp.float32) - centre
    terms = [deviation, deviation**2, deviation**3, deviation**4]
    reach = fp8.fp8_max(cast.data.dtype) * cast.scale_inv
    terms.append((x != 0) & (cast.data.astype(jnp.float32) == 0))
    terms.append(jnp.abs(x.astype(jnp.float32)) > jnp.broadcast_to(reach, x.shape))
    t1, t2, t3, t4, flushed, clipped = jax.lax.psum(_sums(*terms), axis_names)
    d = t1 / count
    m2 = jnp.where(t2 - d * t1 > _NO_VARIANCE * t2, t2 - d * t1, 0.0)
    m3 = t3 - 3 * d * t2 + 2 * d**2 * t1
    m4 = t4 - 4 * d * t3 + 6 * d**2 * t2 - 3 * d**3 * t1
    amax = fp8.amax_over_devices(amax_of(x), axis_names)
    ratio = amax / jnp.max(reach)
    values = (centre + d, m2, m3, m4, amax, amax, flushed, clipped, ratio)
    return Elements(jnp.stack([count, *values]))


def amax_of(x: Float[Array, "m k"]) -> Float[Array, ""]:
    """Returns the largest magnitude, reducing rows first as `_sums` does."""
    return fp8.amax(fp8.amax(x, axes=(1,)))


def of_uses(batch: Elements, uses: Float[Array, ""]) -> Elements:
    """Returns what the sum over some uses of a site tells: means are those of uses."""
    is_added = jnp.array([name in _ADDED for name in _FIELDS])
    values = batch.values
    return Elements(jnp.where(is_added, values, values / jnp.maximum(uses, 1)))


def merge(a: Elements, b: Elements) -> Elements:
    """Returns the statistics of the elements of both; `b` is the later one."""
    count_a, mean_a, a2, a3, a4, amax_a, last_a, *rates_a, ratio_a = a.values
    count_b, mean_b, b2, b3, b4, amax_b, last_b, *rates_b, ratio_b = b.values
    n = jnp.maximum(count_a + count_b, 1)
    p, q = count_a / n, count_b / n
    d = mean_b - mean_a
    m2 = a2 + b2 + n * p * q * d**2
    m3 = a3 + b3 + n * p * q * (p - q) * d**3 + 3 * d * (p * b2 - q * a2)
    m4 = a4 + b4 + n * p * q * (p * p - p * q + q * q) * d**4
    m4 += 6 * d**2 * (p * p * b2 + q * q * a2) + 4 * d * (p * b3 - q * a3)
    has_b = count_b > 0
    merged = (
        count_a + count_b,
        mean_a + q * d,
        m2,
        m3,
        m4,
        jnp.maximum(amax_a, amax_b),
        jnp.where(has_b, last_b, last_a),
        *(x + y for x, y in zip(rates_a, rates_b, strict=True)),
        jnp.where(has_b, ratio_b, ratio_a),
    )
    return Elements(jnp.stack(merged))


def _sums(*terms: Array) -> Float[Array, "t"]:
    """Returns the sum of each of several arrays of one shape.

    Rows are summed first, in a kernel that all terms and other sums over rows share;
    another kernel adds up the rows' sums.
    """
    partial = [jnp.sum(term, axis=1, dtype=jnp.float32) for term in terms]
    return jnp.sum(jnp.stack(partial), axis=1)
