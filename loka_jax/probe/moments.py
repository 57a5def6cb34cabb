"""Mean and covariance of rows, learned batch by batch: LoKA's model of activations.

After n rows with mean m and scatter S, a batch of B rows is merged by (Welford)

    n' = n + B        d = m_batch - m
    m' = m + B / n' d        S' = S + S_batch + n B / n' d d^T

and the covariance is S / (n - 1). Rows are independent samples; only features covary.
Merging is associative: over batches, microbatches and devices the result equals that of
one pass, up to rounding. Everything is float32.

References:
    LoKA, arXiv 2605.10886, section on Probe.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from loka_jax.probe import blocks


class Moments(NamedTuple):
    """Moments of the rows seen so far.

    Attributes:
        count: the number of rows; their total weight after a `decay`.
        mean: the mean of each feature.
        scatter: the sum of outer products about the mean, in diagonal blocks.
    """

    count: Float[Array, ""]
    mean: Float[Array, "k"]
    scatter: Float[Array, "b s s"]

    @property
    def covariance(self) -> Float[Array, "b s s"]:
        """The covariance in blocks; zeros before the second row."""
        return self.scatter / jnp.maximum(self.count - 1, 1)


def empty_moments(k: int) -> Moments:
    """Returns the moments of no rows of k features."""
    size = blocks.block_size(k)
    zero = jnp.zeros((), jnp.float32)
    scatter = jnp.zeros((-(-k // size), size, size), jnp.float32)
    return Moments(zero, jnp.zeros((k,), jnp.float32), scatter)


def moments_of(rows: Float[Array, "m k"], size: int) -> Moments:
    """Returns the moments of `rows`, with the scatter in blocks of `size` features."""
    rows = rows.astype(jnp.float32)
    mean = jnp.mean(rows, axis=0)
    centred = blocks.split(rows - mean[None], size)
    # In TF32 on GPUs, ten times as fast: rows are rounded to 11 bits, but the result is
    # still a scatter, and positive semidefinite.
    scatter = jnp.einsum("mbs,mbt->bst", centred, centred, precision="default")
    return Moments(jnp.float32(rows.shape[0]), mean, scatter)


def merge(a: Moments, b: Moments) -> Moments:
    """Returns the moments of the rows of both."""
    count = a.count + b.count
    share = b.count / jnp.maximum(count, 1)
    difference = b.mean - a.mean
    between = _outer(difference, a.scatter) * (a.count * share)
    mean = a.mean + share * difference
    return Moments(count, mean, a.scatter + b.scatter + between)


def merge_over_devices(moments: Moments, axis_names: tuple[str, ...]) -> Moments:
    """Returns the moments of the rows of all devices along some mesh axes.

    The mean is reduced first, then each device's scatter about it, because raw sums of
    squares would cancel where means are large.
    """
    if not axis_names:
        return moments
    count = jax.lax.psum(moments.count, axis_names)
    weighted = jax.lax.psum(moments.count * moments.mean, axis_names)
    mean = weighted / jnp.maximum(count, 1)
    between = _outer(moments.mean - mean, moments.scatter) * moments.count
    scatter = jax.lax.psum(moments.scatter + between, axis_names)
    return Moments(count, mean, scatter)


def decay(moments: Moments, factor: float | Float[Array, ""]) -> Moments:
    """Returns the moments with the weight of every row multiplied by `factor`."""
    return moments._replace(
        count=factor * moments.count, scatter=factor * moments.scatter
    )


def _outer(x: Float[Array, "k"], like: Float[Array, "b s s"]) -> Float[Array, "b s s"]:
    parts = blocks.split(x, like.shape[-1])
    return parts[:, :, None] * parts[:, None, :]
