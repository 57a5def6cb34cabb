"""OneTrans (Zhang et al., arXiv 2510.26104): one transformer of histories and features.

    S   = item_mlp([e_1; ...; e_K]) + features_c           [C, D]   rows of histories
    T   = split(tokens([e_1; ...; e_{P + K}])) + features_n  [N, L, D]
    X   = [S; T]                                           L tokens after each history
    Z   = MixedMHA(norm(X)) + X                            causal
    X'  = MixedFFN(norm(Z)) + Z
    logit = head(head_mlp(flat norm(T)))

A mixed product has one weight for all rows of histories, and one of its own for each of
the L tokens, which are made of all fields that are known when an event is predicted.
Rows see no tokens, so that all candidates of a history share it. The stack is a
pyramid: after a layer only the newest rows of each history go on, and after the last
one, as nothing reads its rows, the tokens alone.

`EventModel` tells what is added to events. C is the number of rows of all sequences of
a batch, K of fields of an event, P of fields of a sample, N of candidates.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.events import Embeddings, EventModel
from loka_jax.models.ranking import ModelPart

type Mixed = tuple[Float[Array, "_ _"], Float[Array, "N L _"]]  # rows and tokens


class OneTransLayer(ModelPart, kw_only=True):
    """A layer of OneTrans; its options are the model's.

    Attributes:
        branch_gain: gain of the norm of what a branch adds; None for a norm of what it
            reads.
        dropout_rate: of what a branch adds, in training.
    """

    num_heads: int
    ffn_factor: int
    branch_gain: float | None
    qk_norm: nn.QkNormName
    dropout_rate: float

    @linen.compact
    def __call__(
        self, x: Mixed, histories: nn.Histories, most: int | None, *, train: bool
    ) -> tuple[Mixed, nn.Histories]:
        """Returns what goes on, and where its histories lie.

        Args:
            most: rows of a history that go on; None for all.
            train: drop what branches add.
        """
        rows, tokens = x
        (count, dim), length = rows.shape, tokens.shape[1]
        newest = histories.newest(count, most)
        visible = nn.tokens_visibility(histories, newest, count, length)
        q, k, v = self._qkv(self._read("attention_norm", x), newest[0], most)
        mean = -(-count // (len(histories.offsets) - 1)) + length
        how: dict[str, Any] = dict(recipe=self.recipe, implementation=self.kernels)
        seen = nn.attend(q, k, v, visible, length=mean, **how)
        seen = seen.reshape(-1, dim)
        seen = seen[: len(newest[0])], seen[len(newest[0]) :].reshape(x[1].shape)
        kept = nn.distinct_rows(x[0], newest[0]), x[1]
        z = self._sum("attention_norm", kept, self._mixed("out", dim, seen), train)
        hidden = self._mixed("ffn_in", self.ffn_factor * dim, self._read("ffn_norm", z))
        act = nn.activation(self.activation)
        added = self._mixed("ffn_out", dim, _each(act, hidden))
        return self._sum("ffn_norm", z, added, train), newest[1]

    @linen.nowrap
    def _qkv(self, x: Mixed, newest: Array, most: int | None) -> list[Array]:
        """Returns queries of what goes on, and keys and values of all, by heads."""
        rows, tokens = x
        dim, nothing = rows.shape[1], rows[:0]
        _, of_tokens = self._mixed("qkv", 3 * dim, (nothing, tokens))
        if most is None:
            of_rows = self._dense("qkv", 3 * dim)(rows)
            q, k, v = jnp.split(of_rows, 3, axis=1)
        else:
            k, v = jnp.split(self._dense("kv", 2 * dim)(rows), 2, axis=1)
            q = nothing
            if most:
                q = self._dense("q", dim)(nn.distinct_rows(rows, newest))
        of_tokens = of_tokens.reshape(-1, 3 * dim)
        pairs = zip((q, k, v), jnp.split(of_tokens, 3, axis=1), strict=True)
        joined = map(jnp.concatenate, pairs)
        q, k, v = (y.reshape(len(y), self.num_heads, -1) for y in joined)
        bound = functools.partial(nn.QkNorm, self.qk_norm)
        return [bound(name="q_norm")(q), bound(name="k_norm")(k), v]

    @linen.nowrap
    def _mixed(self, name: str, features: int, x: Mixed) -> Mixed:
        """Returns products with a weight of all rows, and one of each token."""
        rows, tokens = x
        name_of_own = f"{name}_tokens"
        own = nn.EachDense(features, self.recipe, self.bias, name=name_of_own)(tokens)
        if not len(rows):
            return jnp.zeros((0, features), rows.dtype), own
        return self._dense(name, features)(rows), own

    @linen.nowrap
    def _dense(self, name: str, features: int) -> nn.Dense:
        return nn.Dense(features, self.recipe, self.bias, name=name)

    @linen.nowrap
    def _read(self, name: str, x: Mixed) -> Mixed:
        """Returns what a branch reads of x."""
        return x if self.branch_gain else self._norm(name, x)

    @linen.nowrap
    def _sum(self, name: str, x: Mixed, branch: Mixed, train: bool) -> Mixed:
        """Returns x and what a branch adds."""
        if self.branch_gain:
            branch = self._norm(name, branch)
        drop = functools.partial(nn.Dropout, self.dropout_rate, not train)
        return x[0] + drop()(branch[0]), x[1] + drop()(branch[1])

    @linen.nowrap
    def _norm(self, name: str, x: Mixed) -> Mixed:
        rows, tokens = x
        how: dict[str, Any] = dict(
            norm="rms", train=False, gain=self.branch_gain or 1.0
        )
        tokens = nn.normalize(tokens, name=f"{name}_tokens", **how)
        return nn.normalize(rows, name=name, **how) if len(rows) else rows, tokens


def _each(function: Any, x: Mixed) -> Mixed:
    return function(x[0]), function(x[1])


class OneTrans(EventModel):
    """OneTrans, from gathered embeddings of an event log to a logit for each candidate.

    Attributes:
        num_tokens: L, tokens of the features of a candidate.
        token_mlp: widths of the MLP of these features before its last layer.
        ffn_factor: width of a layer's hidden products, over D.
        pyramid: for each layer but the last, the newest rows of a history that go on;
            all if empty.
    """

    activation: nn.ActivationName = "gelu"
    num_tokens: int = 4
    token_mlp: tuple[int, ...] = ()
    ffn_factor: int = 4
    pyramid: tuple[int, ...] = ()

    @linen.nowrap
    def _candidates(
        self, embeddings: Embeddings, events: Any, train: bool
    ) -> Float[Array, "N _"]:
        context, fields = embeddings
        features = self._features_of(events)
        rows, histories = self._histories(embeddings, events)
        of_samples = jax.lax.collapse(context, 1)
        shared: Array = nn.sum_of_rows((of_samples,), (histories.of,), context.dtype)
        known = fields[events.targets], shared.reshape(len(shared), *context.shape[1:])
        tokens = self._tokens(known, self.num_tokens, self.token_mlp, train)
        tokens += features[events.targets][:, None]
        x = nn.distinct_rows(self._items(fields, train) + features, rows), tokens
        x = self._begun(x[0], train), self._begun(x[1], train)
        kept = *(self.pyramid or (None,) * (self.num_layers - 1)), 0
        for number, most in enumerate(kept):
            x, histories = self._layer(number)(x, histories, most, train=train)
        return jax.lax.collapse(self._last_norm(x[1], "rms", train), 1)

    @linen.nowrap
    def _check(self, events: Any) -> None:
        if self.dim % self.num_heads:
            raise ValueError(
                f"--dim {self.dim} must be a multiple of --num-heads {self.num_heads}."
            )
        layers = self.num_layers - 1
        if self.pyramid and len(self.pyramid) != layers:
            raise ValueError(
                f"--pyramid {' '.join(map(str, self.pyramid))} must name {layers} "
                f"numbers of rows, as --num-layers is {self.num_layers}."
            )
        if self.pyramid and events.candidates is None:
            raise ValueError(
                "--pyramid leaves out events that are to be predicted: set "
                "--data.targets last."
            )

    @linen.nowrap
    def _layer(self, number: int) -> OneTransLayer:
        return OneTransLayer(
            **self.options,
            **self.of_layers,
            ffn_factor=self.ffn_factor,
            name=f"layer_{number}",
        )
