"""How much the sizes of rows differ: what a Gaussian cannot tell.

Gradients of a ranking model are large for the few examples that it gets wrong, and
near zero for the others. With one covariance for all rows, draws would have rows of one
size, and scales shared by many rows would look better than they are. So the root mean
square of each row about the mean is counted, in half octaves, and drawn rows are scaled
to match.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

_LOWEST, _HIGHEST, _PER_OCTAVE = -56, 24, 2  # log2 of what the bins hold
_BINS = (_HIGHEST - _LOWEST) * _PER_OCTAVE
_UNIT = 20  # powers of two: squares stay in float32's range from the lowest bin on


class RowNorms(NamedTuple):
    """Counts of rows by size; weights once some have been decayed.

    Attributes:
        counts: of each half octave of the root mean square, the smallest first.
    """

    counts: Float[Array, "bins"]


def no_norms() -> RowNorms:
    """Returns the counts of no rows."""
    return RowNorms(jnp.zeros((_BINS,), jnp.float32))


def norms_of(rows: Float[Array, "m k"], centre: Float[Array, "k"]) -> RowNorms:
    """Returns the counts of some rows.

    Args:
        rows: any number, of finite values.
        centre: about which their sizes count: the mean of earlier ones, which is the
            same for all parts of a batch.
    """
    # In a small unit, for squares of small gradients vanish.
    off = (rows.astype(jnp.float32) - centre[None]) * 2.0**_UNIT
    squares = jnp.minimum(jnp.mean(off * off, axis=1), jnp.finfo(jnp.float32).max)
    # A bin a row: XLA fuses the comparisons with a sum over the last axis only.
    low, high = jnp.asarray(_EDGES)[:, :, None]
    is_in_bin = (low <= squares[None]) & (squares[None] < high)
    return RowNorms(jnp.sum(is_in_bin, axis=1, dtype=jnp.float32))


def merge(a: RowNorms, b: RowNorms) -> RowNorms:
    """Returns the counts of the rows of both."""
    return RowNorms(a.counts + b.counts)


def merge_over_devices(norms: RowNorms, axis_names: tuple[str, ...]) -> RowNorms:
    """Returns the counts of the rows of all devices along some mesh axes."""
    if not axis_names:
        return norms
    return RowNorms(jax.lax.psum(norms.counts, axis_names))


def sample_scales(key: Key[Array, ""], norms: RowNorms, m: int) -> Float[Array, "m"]:
    """Returns factors for m rows, whose squares have mean 1; ones if nothing is known.

    Args:
        key: of the draw.
        norms: of the rows seen.
        m: rows.
    """
    bin_key, place_key = jax.random.split(key)
    centres = (jnp.arange(_BINS, dtype=jnp.float32) + 0.5) / _PER_OCTAVE
    weights = norms.counts / jnp.maximum(jnp.sum(norms.counts), 1e-30)
    # In units of the largest seen, lest an exponent be out of range.
    top = jnp.max(jnp.where(weights > 0, centres, 0.0))
    centres = jnp.minimum(centres - top, 0.0)
    mean_square = jnp.sum(weights * jnp.exp2(2 * centres)) * _IN_BIN
    bins = jax.random.categorical(bin_key, jnp.log(weights), shape=(m,))
    within = (jax.random.uniform(place_key, (m,)) - 0.5) / _PER_OCTAVE
    drawn = jnp.exp2(centres[bins] + within)
    drawn = drawn / jnp.sqrt(jnp.maximum(mean_square, 1e-30))
    return jnp.where(jnp.sum(norms.counts) > 0, drawn, 1.0)


# The mean of 4^u over the half octave about 0 in which u is uniform.
_IN_BIN = (2.0**0.5 - 2.0**-0.5) / (2 * 0.5 * 0.6931471805599453)
# Lowest and highest mean square of each bin, in the unit; the outer ones hold the rest.
_EDGES = 4.0 ** (np.arange(_BINS + 1) / _PER_OCTAVE + _LOWEST + _UNIT)
_EDGES = np.stack([_EDGES[:-1], _EDGES[1:]]).astype(np.float32)
_EDGES[0, 0], _EDGES[1, -1] = 0.0, np.inf
