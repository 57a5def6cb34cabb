"""Attention among the vectors of an example.

B is the batch, n the number of vectors, d their dimension, h the number of heads.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.dense import Dense, Fp8DotGeneral
from loka_jax.nn.observed import attention_seen
from loka_jax.recipe import Recipe


class SelfAttention(linen.Module):
    """Multi-head attention of each vector to all of its example's.

        O = concat_h softmax(Q_h K_h^T / sqrt(d / h)) V_h W_O       [Q; K; V] = X W

    `qkv` and `out` are sites; the two products of a head are within each example, and
    run in the compute dtype.

    Attributes:
        num_heads: h, a divisor of d.
    """

    num_heads: int = 1
    recipe: str | Recipe = "fp8_tensorwise"
    use_bias: bool = True

    @linen.compact
    def __call__(self, x: Float[Array, "B n d"]) -> Float[Array, "B n d"]:
        """Returns a vector for each vector.

        Raises:
            ValueError: if d is no multiple of the number of heads.
        """
        batch, n, d = x.shape
        heads, size = self.num_heads, d // self.num_heads
        if size * heads != d:
            raise ValueError(
                f"{heads} heads do not divide vectors of {d}: use a divisor of {d}."
            )
        qkv = self._dense(3 * d, "qkv")(x).reshape(batch, n, 3, heads, size)
        q, k, v = (qkv[:, :, i] for i in range(3))  # [B, n, h, d / h]
        dims = (((3,), (3,)), ((0, 2), (0, 2)))
        scores = self._product("scores", q, k, dims).astype(jnp.float32)
        scores = scores / math.sqrt(size)
        shares = jax.nn.softmax(scores).astype(x.dtype)
        dims = (((3,), (1,)), ((0, 1), (0, 2)))
        seen = self._product("values", shares, v, dims)  # [B, h, n, d / h]
        seen = attention_seen(self, seen, lambda: jnp.max(jnp.abs(scores)))
        return self._dense(d, "out")(seen.swapaxes(1, 2).reshape(batch, n, d))

    def _dense(self, features: int, name: str) -> Dense:
        return Dense(features, recipe=self.recipe, use_bias=self.use_bias, name=name)

    def _product(self, name: str, lhs: Array, rhs: Array, dims) -> Array:
        # GPUs would multiply float32 in TF32.
        precision = jax.lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
        return Fp8DotGeneral(self.recipe, name=name)(lhs, rhs, dims, precision)
