"""Draws operands of a site, from its learned statistics or from N(0, 1).

    rows:     T = mean + s Z L^T               L L^T = covariance + eps I
    weights:  W = Mean + L_U Z L_V^T           of U and V

Z is standard normal; s is a factor per row, drawn from the row norms, with E[s^2] = 1.
The same key gives the same operands.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from loka_jax.probe import blocks
from loka_jax.probe.matrix_normal import MatrixNormal
from loka_jax.probe.moments import Moments
from loka_jax.probe.operands import Operands, operands_of
from loka_jax.probe.row_norms import sample_scales
from loka_jax.probe.site import SiteStats


@functools.partial(jax.jit, static_argnames="rows")
def draw_learned(key: Key[Array, ""], stats: SiteStats, rows: int) -> Operands:
    """Returns operands of a site with the learned means and covariances."""
    keys = jax.random.split(key, 3)
    return operands_of(
        lhs=_rounded(sample_rows(keys[0], stats.lhs.moments, rows, stats.lhs.norms)),
        rhs=sample_weight(keys[1], stats.rhs.normal),
        g=_rounded(sample_rows(keys[2], stats.g.moments, rows, stats.g.norms)),
    )


@functools.partial(jax.jit, static_argnames="sizes")
def draw_normal(key: Key[Array, ""], sizes: tuple[int, int, int]) -> Operands:
    """Returns operands (m, k), (k, n), (m, n) from N(0, 1)."""
    m, k, n = sizes
    keys = jax.random.split(key, 3)
    return operands_of(
        lhs=_rounded(jax.random.normal(keys[0], (m, k))),
        rhs=jax.random.normal(keys[1], (k, n)),
        g=_rounded(jax.random.normal(keys[2], (m, n))),
    )


def _rounded(x: Array) -> Array:
    # Activations and their gradients are bfloat16 when a site reads them.
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def sample_rows(
    key: Key[Array, ""], moments: Moments, m: int, norms: Float[Array, "bins"]
) -> Float[Array, "m k"]:
    """Returns m rows with the learned mean, covariance and norms, float32."""
    (k,), (b, s, _) = moments.mean.shape, moments.scatter.shape
    z_key, scale_key = jax.random.split(key)
    z = jax.random.normal(z_key, (m, b, s))
    drawn = blocks.join(blocks.times(z, blocks.factor(moments.covariance)), k)
    scales = sample_scales(scale_key, norms, m)
    return moments.mean[None] + drawn * scales[:, None]


def sample_weight(key: Key[Array, ""], normal: MatrixNormal) -> Float[Array, "k n"]:
    """Returns a weight with the learned mean and covariances, float32."""
    k, n = normal.mean.shape
    z = jax.random.normal(key, (k, n))
    z = _times(z, normal.columns)
    return normal.mean + _times(z.T, normal.rows).T


def _times(z: Float[Array, "p q"], covariance: Float[Array, "b s s"]):
    parts = blocks.split(z, covariance.shape[-1])
    return blocks.join(blocks.times(parts, blocks.factor(covariance)), z.shape[1])
