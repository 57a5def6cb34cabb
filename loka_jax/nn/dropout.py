"""Dropout by the bits of a hash, the same in a group and by itself."""

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float, UInt32

from loka_jax import tails
from loka_jax.xla.tails import dropped


class Dropout(linen.Module):
    """Dropout as of Flax: a share of elements is 0, others are divided by 1 - rate.

    Flax draws 32 bits of Threefry for each element, which on a GPU takes several times
    as long as reading and writing it. Here a hash of words of the step, row and column
    decides (`unbiased.uniform`), in a few instructions.

    Attributes:
        rate: the share, at least 0 and below 1.
        deterministic: return x as it is.
    """

    rate: float
    deterministic: bool = False

    @linen.compact
    def __call__(self, x: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
        """Returns x after dropout, in its dtype. Training needs the rng "dropout"."""
        dropout = None if self.deterministic else dropout_of(self, self.rate)
        if dropout is None:
            return x
        return dropped(x.reshape(-1, x.shape[-1]), dropout).reshape(x.shape)


def dropout_of(module: linen.Module, rate: float) -> tails.Dropout | None:
    """Returns the dropout of a result, of a module's rng; None for a rate of 0."""
    return tails.Dropout(dropout_words(module, 1)[0], rate) if rate else None


def dropout_words(module: linen.Module, count: int) -> UInt32[Array, "{count} 2"]:
    """Returns random bits of so many results, of a module's rng for dropout."""
    key = module.make_rng("dropout")
    return jax.random.bits(key, (count, 2), jnp.uint32)
