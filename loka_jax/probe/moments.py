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


def moments_of(
    rows: Float[Array, "m k"], size: int, axis_names: tuple[str, ...] = ()
) -> Moments:
    """Returns the moments of rows, with the scatter in blocks of `size` features.

    Of the rows of all devices along some mesh axes, each of which has as many.
    """
    rows = rows.astype(jnp.float32)
    mean = jax.lax.pmean(jnp.mean(rows, axis=0), axis_names)
    centred = blocks.split(rows - mean[None], size)
    # In TF32 on GPUs, ten times as fast: rows are rounded to 11 bits, but the result is
    # still a scatter, and positive semidefinite.
    scatter = jnp.einsum("mbs,mbt->bst", centred, centred, precision="default")
    count = jnp.float32(rows.shape[0])
    count, scatter = jax.lax.psum((count, scatter), axis_names)
    return Moments(count, mean, scatter)


def merge(a: Moments, b: Moments, decay: float | Float[Array, ""] = 1.0) -> Moments:
    """Returns the moments of the rows of both, those of `a` of a lower weight."""
    before, scatter = decay * a.count, decay * a.scatter
    count = before + b.count
    share = b.count / jnp.maximum(count, 1)
    difference = b.mean - a.mean
    parts = blocks.split(difference, scatter.shape[-1])
    between = parts[:, :, None] * parts[:, None, :] * (before * share)
    mean = a.mean + share * difference
    return Moments(count, mean, scatter + b.scatter + between)
