"""The distribution of the rows' norms, which a Gaussian does not represent.

Gradients of a ranking model are large for the few examples that it gets wrong, and
near zero for the others. With one covariance for all rows, drawn rows would have about
equal norms, and scales shared by many rows would look better than they are. So each
row's root mean square about the mean is counted in bins of half an octave, and drawn
rows are scaled to match.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

_LOWEST, _HIGHEST, _PER_OCTAVE = -56, 24, 2  # range of the bins in log2
BINS = (_HIGHEST - _LOWEST) * _PER_OCTAVE
_UNIT = 20  # rows are multiplied by 2^20, so that squares do not underflow float32


def norms_of(
    rows: Float[Array, "m k"], centre: Float[Array, "k"]
) -> Float[Array, "bins"]:
    """Returns the counts of rows by their norm, the smallest first.

    Norms are measured from `centre`: the mean of earlier rows, which is the same for
    all parts of a batch.
    """
    deviation = (rows.astype(jnp.float32) - centre[None]) * 2.0**_UNIT
    squares = jnp.mean(deviation * deviation, axis=1)
    squares = jnp.minimum(squares, jnp.finfo(jnp.float32).max)
    # One bin per row, as XLA fuses the comparisons only with a sum over the last axis.
    low, high = jnp.asarray(_EDGES)[:, :, None]
    is_in_bin = (low <= squares[None]) & (squares[None] < high)
    return jnp.sum(is_in_bin, axis=1, dtype=jnp.float32)


def sample_scales(
    key: Key[Array, ""], counts: Float[Array, "bins"], m: int
) -> Float[Array, "m"]:
    """Returns factors for m rows, drawn from counts; ones if all are 0.

    The mean of their squares is 1 in expectation.
    """
    bin_key, place_key = jax.random.split(key)
    centres = (jnp.arange(BINS, dtype=jnp.float32) + 0.5) / _PER_OCTAVE
    weights = counts / jnp.maximum(jnp.sum(counts), 1e-30)
    # Relative to the largest norm seen, to keep exponents in range.
    top = jnp.max(jnp.where(weights > 0, centres, 0.0))
    centres = jnp.minimum(centres - top, 0.0)
    mean_square = jnp.sum(weights * jnp.exp2(2 * centres)) * _IN_BIN
    bins = jax.random.categorical(bin_key, jnp.log(weights), shape=(m,))
    within = (jax.random.uniform(place_key, (m,)) - 0.5) / _PER_OCTAVE
    drawn = jnp.exp2(centres[bins] + within)
    drawn = drawn / jnp.sqrt(jnp.maximum(mean_square, 1e-30))
    return jnp.where(jnp.sum(counts) > 0, drawn, 1.0)


# The mean of 4^u for u uniform in the half octave about 0.
_IN_BIN = (2.0**0.5 - 2.0**-0.5) / (2 * 0.5 * 0.6931471805599453)
# Lower and upper mean square of each bin, times 4^_UNIT; the outer bins are unbounded.
_EDGES = 4.0 ** (np.arange(BINS + 1) / _PER_OCTAVE + _LOWEST + _UNIT)
_EDGES = np.stack([_EDGES[:-1], _EDGES[1:]]).astype(np.float32)
_EDGES[0, 0], _EDGES[1, -1] = 0.0, np.inf
