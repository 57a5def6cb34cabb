"""Block-diagonal covariances, which limit the memory that large ones take.

A covariance of k features is stored as b diagonal blocks of s features each. With one
block it is complete; with several, covariances between blocks are left out. The last
block is padded with features that are zero.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The covariance of up to 2,048 features is one block.
MAX_BYTES = 16 << 20
# Share of the mean variance that is added to every variance, so that factors exist.
_JITTER = 1e-6
_MIN_JITTER = 1e-30  # if all variances are zero


def block_size(k: int) -> int:
    """Returns s: k if k x k float32 fit, else the largest power of two for k x s."""
    if 4 * k > MAX_BYTES:
        raise ValueError(f"{k} variances take more than {MAX_BYTES=}.")
    if 4 * k * k <= MAX_BYTES:
        return k
    return 1 << int(math.log2(MAX_BYTES // (4 * k)))


def split(x: Float[Array, "... k"], size: int) -> Float[Array, "... b s"]:
    """Splits the last dim into blocks of `size`; the last one is padded with zeros."""
    *leading, k = x.shape
    blocks = -(-k // size)
    padding = [(0, 0)] * len(leading) + [(0, blocks * size - k)]
    return jnp.pad(x, padding).reshape(*leading, blocks, size)


def join(x: Float[Array, "... b s"], k: int) -> Float[Array, "... k"]:
    """Joins the blocks of the last dim: the inverse of `split`."""
    return x.reshape(*x.shape[:-2], -1)[..., :k]


def factor(covariance: Float[Array, "b s s"]) -> Float[Array, "b s s"]:
    """Returns lower triangular L with `L L^T = covariance + eps I`.

    eps, a millionth of the mean variance of all blocks, makes the sum positive definite
    whatever the rank.
    """
    b, s, _ = covariance.shape
    variance = jnp.trace(covariance, axis1=1, axis2=2).sum() / (b * s)
    eps = jnp.maximum(_JITTER * variance, _MIN_JITTER)
    return jnp.linalg.cholesky(covariance + eps * jnp.eye(s, dtype=jnp.float32)[None])


def times(
    z: Float[Array, "... b s"], factors: Float[Array, "b s s"]
) -> Float[Array, "... b s"]:
    """Returns `z L^T`, block by block."""
    return jnp.einsum("...bs,bts->...bt", z, factors, precision="highest")


def solve(
    factors: Float[Array, "b s s"], x: Float[Array, "m b s"]
) -> Float[Array, "m b s"]:
    """Returns `x L^-T`, block by block, by triangular solves."""
    columns = jnp.moveaxis(x, 0, -1)  # [b, s, m]
    solution = jax.lax.linalg.triangular_solve(
        factors, columns, left_side=True, lower=True
    )
    return jnp.moveaxis(solution, -1, 0)
