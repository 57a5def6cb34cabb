"""Models of a user's own, in a file that can be imported."""

import jax.numpy as jnp
from flax import linen


class Plain(linen.Module):
    """Knows nothing of loka_jax: no recipe, no `train`, logits [B, 1]."""

    widths: tuple[int, ...] = (32,)

    @linen.compact
    def __call__(self, dense, embeddings):
        x = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        for width in self.widths:
            x = linen.relu(linen.Dense(width)(x))
        return linen.Dense(1)(x)


class Dropping(linen.Module):
    """Has dropout, by `train`."""

    @linen.compact
    def __call__(self, dense, embeddings, train=False):
        x = embeddings.reshape(len(dense), -1)
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return linen.Dense(1)(x)[:, 0]


class Wrong(linen.Module):
    """Returns one number."""

    @linen.compact
    def __call__(self, dense, embeddings):
        return linen.Dense(1)(dense).sum()


class NoModel:
    """Is none."""
