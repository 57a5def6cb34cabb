"""Operands drawn from what was learned.

    rows:     T = mean + Z L^T                 L L^T = covariance + eps I
    weights:  W = Mean + L_U Z L_V^T           of U and V

Z is standard normal; the same key gives the same operands.
"""

import jax
from jaxtyping import Array, Float, Key

from loka_jax.probe import blocks
from loka_jax.probe.matrix_normal import MOMENTUM, MatrixNormal, mean_of
from loka_jax.probe.moments import Moments


def sample_rows(key: Key[Array, ""], moments: Moments, m: int) -> Float[Array, "m k"]:
    """Returns m rows with the learned mean and covariance, float32."""
    (k,), (b, s, _) = moments.mean.shape, moments.scatter.shape
    z = jax.random.normal(key, (m, b, s))
    correlated = blocks.times(z, blocks.factor(moments.covariance))
    return moments.mean[None] + blocks.join(correlated, k)


def sample_weight(
    key: Key[Array, ""], known: MatrixNormal, *, momentum: float = MOMENTUM
) -> Float[Array, "k n"]:
    """Returns a weight with the learned mean and covariances, float32."""
    k, n = known.mean.shape
    z = jax.random.normal(key, (k, n))
    z = _times(z, known.columns)
    return mean_of(known, momentum=momentum) + _times(z.T, known.rows).T


def _times(z: Float[Array, "p q"], covariance: Float[Array, "b s s"]):
    parts = blocks.split(z, covariance.shape[-1])
    return blocks.join(blocks.times(parts, blocks.factor(covariance)), z.shape[1])
