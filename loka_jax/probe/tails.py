"""How heavy the tails of an operand are, and what an FP8 cast does to its ends.

Of all elements together, with central moments that merge (Pebay 2008):

    kurtosis = n M4 / M2^2            3 for a Gaussian
    underflow, saturation rate        shares flushed to zero, and clipped
    amax ratio                        amax now / amax that the scale was made for

All are kept in one vector: inside a training step every array of its own costs a kernel
or two, and every step that carries it costs its handing over.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from loka_jax import fp8
from loka_jax.fp8 import Fp8Array

_FIELDS = (
    *("count", "mean", "m2", "m3", "m4"),
    *("amax", "last_amax", "flushed", "clipped", "amax_ratio"),
)
# Of the sum of squares: less than that is what rounding leaves of no variance.
_NO_VARIANCE = 1e-6


class Tails(NamedTuple):
    """What is known of all elements seen so far.

    Attributes:
        values: float32, what the properties below name.
    """

    values: Float[Array, "10"]

    @property
    def count(self) -> Float[Array, ""]:
        """Elements."""
        return self._value("count")

    @property
    def mean(self) -> Float[Array, ""]:
        """Of all elements."""
        return self._value("mean")

    @property
    def variance(self) -> Float[Array, ""]:
        """Of all elements."""
        return self._value("m2") / jnp.maximum(self.count, 1)

    @property
    def kurtosis(self) -> Float[Array, ""]:
        """`n M4 / M2^2`; 0 where nothing varies."""
        m2, m4 = self._value("m2"), self._value("m4")
        safe = jnp.where(m2 > 0, m2, 1.0)
        return jnp.where(m2 > 0, self.count * (m4 / safe) / safe, 0.0)

    @property
    def amax(self) -> Float[Array, ""]:
        """The largest magnitude."""
        return self._value("amax")

    @property
    def last_amax(self) -> Float[Array, ""]:
        """That of the last batch, or microbatch."""
        return self._value("last_amax")

    @property
    def underflow_rate(self) -> Float[Array, ""]:
        """The share of elements that are not zero, but are in FP8."""
        return self._value("flushed") / jnp.maximum(self.count, 1)

    @property
    def saturation_rate(self) -> Float[Array, ""]:
        """The share of elements beyond the largest magnitude of their scale."""
        return self._value("clipped") / jnp.maximum(self.count, 1)

    @property
    def amax_ratio(self) -> Float[Array, ""]:
        """The last batch's amax over the one that its scale was made for.

        0 before any cast.
        """
        return self._value("amax_ratio")

    def _value(self, name: str) -> Float[Array, ""]:
        return self.values[_FIELDS.index(name)]


def no_tails() -> Tails:
    """Returns the tails of no elements."""
    return Tails(jnp.zeros((len(_FIELDS),), jnp.float32))


def tails_of(
    x: Float[Array, "m k"],
    cast: Fp8Array | None = None,
    *,
    centre: Float[Array, ""] | float = 0.0,
) -> Tails:
    """Returns the tails of an array, and if it was cast, what that did to it.

    Args:
        x: the array; not empty.
        cast: its FP8 form, with scales that broadcast against it.
        centre: about which powers are summed: near the mean, where that is far from
            zero by the standard deviation.
    """
    count = float(x.size)
    off = x.astype(jnp.float32) - centre
    terms = [off, off**2, off**3, off**4]
    if cast is not None:
        reach = fp8.fp8_max(cast.data.dtype) * cast.scale_inv
        terms.append((x != 0) & (cast.data.astype(jnp.float32) == 0))
        terms.append(jnp.abs(x.astype(jnp.float32)) > jnp.broadcast_to(reach, x.shape))
    t1, t2, t3, t4, *rates = _sums(*terms)
    d = t1 / count
    m2 = jnp.where(t2 - d * t1 > _NO_VARIANCE * t2, t2 - d * t1, 0.0)
    m3 = t3 - 3 * d * t2 + 2 * d**2 * t1
    m4 = t4 - 4 * d * t3 + 6 * d**2 * t2 - 3 * d**3 * t1
    amax = amax_of(x)
    zero = jnp.zeros((), jnp.float32)
    flushed, clipped, ratio = zero, zero, zero
    if cast is not None:
        (flushed, clipped), ratio = rates, amax / jnp.max(reach)
    found = (centre + d, m2, m3, m4, amax, amax, flushed, clipped, ratio)
    return Tails(jnp.stack([jnp.float32(count), *found]))


def amax_of(x: Float[Array, "m k"]) -> Float[Array, ""]:
    """Returns the largest magnitude, of rows first as all sums are."""
    return fp8.amax(fp8.amax(x, axes=(1,)))


def merge(a: Tails, b: Tails) -> Tails:
    """Returns the tails of the elements of both; `b` is the later one."""
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
    return Tails(jnp.stack(merged))


def is_finite(tails: Tails) -> Bool[Array, ""]:
    """Returns True if no element was infinite or NaN."""
    return jnp.all(jnp.isfinite(tails.values))


def merge_over_devices(tails: Tails, axis_names: tuple[str, ...]) -> Tails:
    """Returns the tails of the elements of all devices along some mesh axes."""
    if not axis_names:
        return tails
    gathered = jax.lax.all_gather(tails.values, axis_names)
    gathered = gathered.reshape(-1, len(_FIELDS))
    merged = functools.reduce(merge, map(Tails, gathered)).values
    for name in ("last_amax", "amax_ratio"):
        place = _FIELDS.index(name)
        merged = merged.at[place].set(jnp.max(gathered[:, place]))
    return Tails(merged)


def _sums(*terms: Array) -> Float[Array, "t"]:
    """Returns the sum of each of some arrays of one shape.

    Of rows first, in a kernel that all terms share, with other sums over rows too; then
    of the rows' sums, in another.
    """
    partial = [jnp.sum(term, axis=1, dtype=jnp.float32) for term in terms]
    return jnp.sum(jnp.stack(partial), axis=1)
