"""Models of a user's own, in a file that can be imported."""

import jax.numpy as jnp
from flax import linen, nnx


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


class Nnx(nnx.Module):
    """One of NNX, with a list, running moments and dropout."""

    def __init__(self, num_dense, num_fields, dim, num_tasks, *, width=32, rngs):
        sizes = num_dense + num_fields * dim, width
        self.layers = nnx.List([nnx.Linear(*sizes, rngs=rngs)])
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(width, num_tasks, rngs=rngs)

    def __call__(self, dense, embeddings):
        x = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(self.dropout(self.norm(x)))


class Remembering(nnx.Module):
    """Has state that a run does not save."""

    def __init__(self):
        self.seen = nnx.Cache(jnp.zeros(()))

    def __call__(self, dense, embeddings):
        return dense.sum(axis=1)


class Block(linen.Module):
    """A residual branch: a block, and no dense layer."""

    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(x.shape[-1])(linen.LayerNorm()(x))


class Stacked(linen.Module):
    """Two blocks between dense layers."""

    @linen.compact
    def __call__(self, dense, embeddings):
        x = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        x = linen.Dense(16)(x)
        for _ in range(2):
            x = Block()(x)
        return linen.Dense(1)(x)


class _Step(linen.Module):
    """A block as `nn.scan` calls it."""

    @linen.compact
    def __call__(self, x, _):
        return Block()(x), None


class Scanned(linen.Module):
    """Three blocks whose parameters are stacked."""

    @linen.compact
    def __call__(self, dense, embeddings):
        x = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        x = linen.Dense(16)(x)
        own = dict(variable_axes={"params": 0}, split_rngs={"params": True})
        x, _ = linen.scan(_Step, length=3, **own)()(x, None)
        return linen.Dense(1)(x)


class NnxBlock(nnx.Module):
    """The same of NNX."""

    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.dense = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.dense(self.norm(x))


class NnxStacked(nnx.Module):
    """The same of NNX."""

    def __init__(self, num_dense, num_fields, dim, *, rngs):
        self.first = nnx.Linear(num_dense + num_fields * dim, 16, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(16, rngs) for _ in range(2)])
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, dense, embeddings):
        x = jnp.concatenate([dense, embeddings.reshape(len(dense), -1)], axis=1)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
