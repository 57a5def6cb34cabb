"""Draws operands from the learned statistics.

    rows:     T = mean + s Z L^T               L L^T = covariance + eps I
    weights:  W = Mean + L_U Z L_V^T           of U and V

Z is standard normal; s is a factor per row, drawn from the row norms, with E[s^2] = 1.
The same key gives the same operands.
"""

import jax
from jaxtyping import Array, Float, Key

from loka_jax.probe import blocks
from loka_jax.probe.matrix_normal import MatrixNormal
from loka_jax.probe.moments import Moments
from loka_jax.probe.row_norms import RowNorms, sample_scales


def sample_rows(
    key: Key[Array, ""], moments: Moments, m: int, norms: RowNorms | None = None
) -> Float[Array, "m k"]:
    """Returns m rows with the learned mean and covariance, float32.

    Args:
        key: the random key.
        moments: mean and covariance.
        m: the number of rows.
        norms: the norms to draw; if None rows are Gaussian, as in the paper.
    """
    (k,), (b, s, _) = moments.mean.shape, moments.scatter.shape
    z_key, scale_key = jax.random.split(key)
    z = jax.random.normal(z_key, (m, b, s))
    drawn = blocks.join(blocks.times(z, blocks.factor(moments.covariance)), k)
    if norms is not None:
        drawn = drawn * sample_scales(scale_key, norms, m)[:, None]
    return moments.mean[None] + drawn


def sample_weight(key: Key[Array, ""], normal: MatrixNormal) -> Float[Array, "k n"]:
    """Returns a weight with the learned mean and covariances, float32."""
    k, n = normal.mean.shape
    z = jax.random.normal(key, (k, n))
    z = _times(z, normal.columns)
    return normal.mean + _times(z.T, normal.rows).T


def _times(z: Float[Array, "p q"], covariance: Float[Array, "b s s"]):
    parts = blocks.split(z, covariance.shape[-1])
    return blocks.join(blocks.times(parts, blocks.factor(covariance)), z.shape[1])
