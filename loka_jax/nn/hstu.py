"""A layer of HSTU on jagged rows.

C is the number of rows of all sequences together, B that of sequences, h of heads.
"""

from typing import Any, Literal

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float, Int32

from loka_jax import jagged
from loka_jax.heads import Qkv
from loka_jax.jagged import Rule
from loka_jax.nn.dropout import dropout_of
from loka_jax.nn.jagged_attention import JaggedAttention
from loka_jax.nn.norm_dense import NormParameters
from loka_jax.nn.norms import QkNorm, QkNormName, normalize
from loka_jax.nn.pre_norm_dense import PreNormDense
from loka_jax.normed import NormVectors
from loka_jax.ops.distinct_rows import distinct_rows
from loka_jax.ops.gated_norm import gated_norm
from loka_jax.recipe import Recipe


def newest_rows(
    x: Float[Array, "C D"],
    offsets: Int32[Array, " B_plus_1"],
    targets: Int32[Array, " N"],
    counts: Int32[Array, " B"],
    most: int,
) -> tuple[Float[Array, "n D"], Int32[Array, " B_plus_1"], Int32[Array, " N"]]:
    """Returns the newest `counts` rows of each sequence, their offsets and targets.

    Args:
        targets: rows among the newest, whose places are returned.
        most: a bound of the sum of `counts`.
    """
    rows, kept = jagged.newest(offsets, counts, min(most, len(x)))
    left_out = (offsets - kept)[1:][jagged.sequence_of(offsets, targets)]
    return distinct_rows(x, rows), kept, jnp.maximum(targets - left_out, 0)


class HstuLayer(linen.Module):
    """A layer of HSTU, as its published code has it.

        [U; V; Q; K] = norm(X) W_uvqk + b            U = silu(U)
        A V          = silu(Q K^T / sqrt(d_qk)) / N  V       over the rows seen
        X'           = X + [U; A V; norm(A V) * U] W_o

    `uvqk` and `out` are sites, each a group with its norm or sum; `attention` is one,
    too, which runs in the compute dtype unless its choice is forward in FP8.

    Attributes:
        num_heads: h.
        qk_dim: d_qk, of a head.
        v_dim: of a head, for U, V and A V.
        max_length: N, not less than the rows of the longest sequence.
        window: of rows seen; see `jagged.Rule`, also for `oldest`.
        dropout_rate: of what `out` reads, in training.
        branch_gain: gain of an RMSNorm of what is added to X, at the start; X itself is
            not normalized then. None for the norm of X.
        qk_norm: a bound on Q and K, see `QkNorm`.
        implementation: "xla" for XLA everywhere, "group" for groups of the products.

    References:
        Zhai et al., Actions Speak Louder than Words, arXiv 2402.17152, eqs. 1 to 3.
    """

    num_heads: int
    qk_dim: int
    v_dim: int
    max_length: int
    window: int | None = None
    oldest: int = 0
    dropout_rate: float = 0.0
    branch_gain: float | None = None
    qk_norm: QkNormName = "none"
    recipe: str | Recipe = "fp8_tensorwise"
    use_bias: bool = True
    implementation: Literal["xla", "group"] | None = None

    @linen.compact
    def __call__(
        self,
        x: Float[Array, "C D"],
        offsets: Int32[Array, " B_plus_1"],
        *,
        num_contextual: Int32[Array, " B"] | None = None,
        num_candidates: Int32[Array, " B"] | None = None,
        train: bool = False,
    ) -> Float[Array, "C D"]:
        """Returns a row for each row. Training with dropout needs its rng.

        Args:
            x: rows; those from the last offset on are padding, and stay finite.
            offsets: as of `jagged_attention`.
            num_contextual, num_candidates: see `jagged.Rule`.
            train: drop activations.
        """
        count, width = x.shape
        heads, qk, v = self.num_heads, self.qk_dim, self.v_dim
        norm = None if self.branch_gain else NormParameters("layer", name="norm")
        uvqk = self._dense(2 * heads * (v + qk), "uvqk", norm=norm)(x)
        uvqk = self._bounded(uvqk)
        rule = Rule(num_contextual, num_candidates, self.window, self.oldest)
        u, attended = self._attend(Qkv((uvqk,), heads, v), offsets, rule)
        read = self._gated(u, attended.reshape(count, heads * v), train)
        out = self._dense(width, "out", use_bias=False)
        if not self.branch_gain:
            return out(read, x)
        how: dict[str, Any] = dict(train=train, gain=self.branch_gain, name="norm")
        return x + normalize(out(read), "rms", **how)

    @linen.nowrap
    def _bounded(self, uvqk: Float[Array, "C n"]) -> Float[Array, "C n"]:
        """Returns the rows with their queries and keys bounded."""
        if self.qk_norm == "none":
            return uvqk
        rest = 2 * self.num_heads * self.v_dim
        shape = len(uvqk), self.num_heads, self.qk_dim
        q, k = (x.reshape(shape) for x in jnp.split(uvqk[:, rest:], 2, axis=1))
        q = QkNorm(self.qk_norm, name="q_norm")(q)
        k = QkNorm(self.qk_norm, name="k_norm")(k)
        parts = uvqk[:, :rest], q.reshape(len(q), -1), k.reshape(len(k), -1)
        return jnp.concatenate(parts, axis=1)

    def _attend(self, rows: Qkv, offsets: Array, rule: Rule) -> tuple[Any, Array]:
        """Returns rows that begin with U, and the attention [C, h, d_v]."""
        site = JaggedAttention(
            max_length=self.max_length,
            recipe=self.recipe,
            implementation=self.implementation,
            name="attention",
        )
        return site(rows, offsets, rule)

    @linen.nowrap
    def _gated(
        self, u: Float[Array, "C _"], attended: Float[Array, "C n"], train: bool
    ) -> Float[Array, "C 3*n"]:
        """Returns what `out` reads, of rows that begin with U."""
        norm = NormParameters("layer", name="attention_norm")
        vectors = NormVectors(None, *norm(attended.shape[1]))
        dropout = dropout_of(self, self.dropout_rate) if train else None
        provider = "xla" if self.implementation == "xla" else None
        return gated_norm(u, attended, vectors, dropout, implementation=provider)

    @linen.nowrap
    def _dense(self, features: int, name: str, **options: Any) -> PreNormDense:
        options = dict(use_bias=self.use_bias, recipe=self.recipe) | options
        implementation = self.implementation
        return PreNormDense(
            features, implementation=implementation, name=name, **options
        )
