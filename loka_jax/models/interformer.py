"""InterFormer (Zeng et al., arXiv 2411.09852): features and a history in exchange.

    X       = split(tokens([e_1; ...; e_{P + K}]))         [B, n, D]    of an event
    S       = [CLS; items]                                 [R, D]       of its history
    items_c = lce(e * mask(e)) + features_c                e = [e_1; ...; e_K]

    X_sum   = gate(W^T X)                                  [B, n_sum, D]
    S_sum   = gate([CLS; PMA(S); newest rows of S])        [B, n_S, D]
    X'      = interaction([X; S_sum])                      a layer of DHEN
    Z       = S + PFFN(X_sum, norm(S))                     PFFN(X_sum, s) = X_sum^T W s
    S'      = Z + MHA(norm(Z))
    logit   = head(head_mlp(flat [X_L; S_sum of S_L]))

    gate(Y) = act(Z * (W Z)), Z = norm(Y)

CLS are the first of the first X_sum. The weight X_sum^T W of a PFFN is one of the event
and its sample; it has the rank n_sum, and is not made. MHA is softmax attention of all
rows of a history with rotary embedding, in which places count from the end; PMA is that
of learned queries, without it. As an event changes the rows of its history, no two
share one. (The paper does not say where it has norms and sums with the input.)

`EventModel` tells what is added to events. R is the number of rows of all sequences of
a batch, B that of sequences, K of fields of an event, P of fields of a sample, C of
rows of a batch as they come.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.dhen import DhenLayer
from loka_jax.models.events import Embeddings, EventModel
from loka_jax.models.ranking import ModelPart


class Part(ModelPart, kw_only=True):
    """What parts of InterFormer share.

    Attributes:
        dropout_rate: of what is added to the rows of a history, in training.
    """

    num_heads: int
    branch_gain: float | None
    qk_norm: nn.QkNormName
    dropout_rate: float

    @property
    def options(self) -> dict[str, Any]:
        """The options that parts of this one have, too."""
        names = "num_heads", "branch_gain", "qk_norm", "dropout_rate"
        return super().options | {name: getattr(self, name) for name in names}

    @linen.nowrap
    def _dense(self, name: str, features: int) -> nn.Dense:
        return nn.Dense(features, self.recipe, self.bias, name=name)

    @linen.nowrap
    def _rms(self, name: str, x: Array, gain: float = 1.0) -> Array:
        return nn.normalize(x, "rms", train=False, gain=gain, name=name)

    @linen.nowrap
    def _gate(self, y: Float[Array, "B m D"]) -> Float[Array, "B m D"]:
        z = self._rms("norm", y)
        return nn.activation(self.activation)(z * self._dense("gate", z.shape[2])(z))

    @linen.nowrap
    def _bounded(self, name: str, x: Array) -> Array:
        return nn.QkNorm(self.qk_norm, name=name)(x)

    @linen.nowrap
    def _attended(
        self, q: Array, k: Array, v: Array, of: Array, sequences: nn.Sequences
    ) -> Float[Array, "Q h d"]:
        """Returns the attention of queries to all rows of their sequences, `of`."""
        ends = sequences.offsets[of], sequences.offsets[of + 1]
        visible = nn.span_visibility(*ends, len(k))
        how: dict[str, Any] = dict(recipe=self.recipe, implementation=self.kernels)
        length = -(-len(k) // len(sequences.lengths))
        return nn.attend(q, k, v, visible, length=length, **how)


class Mha(Part, kw_only=True):
    """Attention of the rows of each sequence to its rows.

    Attributes:
        longest: the most rows of a sequence.
    """

    longest: int

    @linen.compact
    def __call__(
        self, s: Float[Array, "R D"], sequences: nn.Sequences
    ) -> Float[Array, "R D"]:
        """Returns a row for each row."""
        dim = s.shape[1]
        heads = self._dense("qkv", 3 * dim)(s).reshape(len(s), 3, self.num_heads, -1)
        # What is new is near whatever the length.
        to_end = sequences.lengths[sequences.of] - sequences.place
        q, k = (
            nn.rotated(self._bounded(f"{name}_norm", heads[:, i]), to_end, self.longest)
            for i, name in enumerate("qk")
        )
        seen = self._attended(q, k, heads[:, 2], sequences.of, sequences)
        return self._dense("out", dim)(seen.reshape(-1, dim))


class Pma(Part, kw_only=True):
    """Attention of learned queries to the rows of each sequence.

    The queries of a head have the width of the rows, which are keys and values: its
    projections of keys would only change the queries, and those of values `out`.

    Attributes:
        seeds: the number of what is learned of each sequence.
    """

    seeds: int

    @linen.compact
    def __call__(
        self, s: Float[Array, "R D"], sequences: nn.Sequences
    ) -> Float[Array, "B seeds D"]:
        """Returns what is pooled of each sequence."""
        dim, batch = s.shape[1], len(sequences.lengths)
        shape = self.seeds * self.num_heads, 1, dim
        normal = linen.initializers.normal(1.0)
        q = self.param("queries", normal, shape, jnp.float32).astype(s.dtype)
        q = jnp.tile(self._bounded("q_norm", q), (batch, 1, 1))
        k = self._bounded("k_norm", s[:, None])
        of = jnp.repeat(jnp.arange(batch), shape[0])
        seen = self._attended(q, k, s[:, None], of, sequences)
        return self._dense("out", dim)(seen.reshape(batch, self.seeds, -1))


class FeatureSummary(Part, kw_only=True):
    """What a sequence learns of features: X_sum."""

    num_sums: int

    @linen.compact
    def __call__(self, x: Float[Array, "B n D"]) -> Float[Array, "B n_sum D"]:
        """Returns the summary of each sample."""
        lce = nn.Compress(self.num_sums, recipe=self.recipe, name="lce")
        return self._gate(lce(x))


class SequenceSummary(Part, kw_only=True):
    """What features learn of a sequence: S_sum."""

    num_cls: int
    num_seeds: int
    num_recent: int

    @linen.compact
    def __call__(
        self, s: Float[Array, "R D"], sequences: nn.Sequences
    ) -> Float[Array, "B n_S D"]:
        """Returns the summary of each sequence, of zeros for rows that it lacks."""
        cls = sequences.oldest(s, self.num_cls)
        pooled = Pma(seeds=self.num_seeds, **self.options, name="pma")(s, sequences)
        recent = sequences.newest(s, self.num_recent, after=self.num_cls)
        return self._gate(jnp.concatenate([cls, pooled, recent], axis=1))


class SequenceLayer(Part, kw_only=True):
    """What a sequence learns of features and of its rows.

    Attributes:
        longest: the most rows of a sequence.
    """

    longest: int

    @linen.compact
    def __call__(
        self,
        s: Float[Array, "R D"],
        x_sum: Float[Array, "B n_sum D"],
        sequences: nn.Sequences,
        *,
        train: bool,
    ) -> Float[Array, "R D"]:
        """Returns a row for each row."""
        ws = self._dense("pffn", x_sum.shape[1])(self._read("pffn_norm", s))
        ws = sequences.oldest(ws, self.longest)  # [B, T, n_sum]
        by_sample = nn.Fp8DotGeneral(self.recipe, name="pffn_sample")
        dims, exact = (((2,), (1,)), ((0,), (0,))), jax.lax.Precision.HIGHEST
        precision = exact if s.dtype == jnp.float32 else None  # TF32 on GPUs
        pffn = sequences.flat(by_sample(ws, x_sum, dims, precision))
        z = s + self._added("pffn_norm", pffn, train)
        attend = Mha(longest=self.longest, **self.options, name="attention")
        seen = attend(self._read("attention_norm", z), sequences)
        return z + self._added("attention_norm", seen, train)

    @linen.nowrap
    def _read(self, name: str, x: Array) -> Array:
        return x if self.branch_gain else self._rms(name, x)

    @linen.nowrap
    def _added(self, name: str, x: Array, train: bool) -> Array:
        x = self._rms(name, x, self.branch_gain) if self.branch_gain else x
        return nn.Dropout(self.dropout_rate, deterministic=not train)(x)


class InterFormer(EventModel):
    """InterFormer, from gathered embeddings of an event log to a logit of each event.

    Attributes:
        num_embeddings: n, embeddings that are made of the features of an event.
        token_mlp: widths of the MLP that makes them, before its last layer.
        num_sums: n_sum, of the summary of features.
        num_cls: of these, what stands before the rows of a history.
        num_seeds: learned queries that pool a history.
        num_recent: newest rows in the summary of a history.
        dot_mlp, cross_rank: of the interactions, see `Dhen`.
    """

    one_candidate: ClassVar[bool] = True

    norm: nn.NormName = "layer"
    activation: nn.ActivationName = "swish"
    num_embeddings: int = 4
    token_mlp: tuple[int, ...] = ()
    num_sums: int = 4
    num_cls: int = 4
    num_seeds: int = 2
    num_recent: int = 2
    dot_mlp: tuple[int, ...] = (512,)
    cross_rank: int | None = None

    @linen.nowrap
    def _candidates(
        self, embeddings: Embeddings, events: Any, train: bool
    ) -> Float[Array, "B _"]:
        context, fields = embeddings
        rows, histories = self._histories(embeddings, events)
        items = self._items(self._masked(fields, train), train)
        features = self._features_of(events, has_positions=False)
        s = nn.distinct_rows(self._begun(items + features, train), rows)
        known = fields[events.targets], context
        x = self._tokens(known, self.num_embeddings, self.token_mlp, train)
        x = self._begun(x, train)
        x_sum = self._part(FeatureSummary, 0, num_sums=self.num_sums)(x)
        taken, sequences = nn.with_leaders(histories.offsets, len(s), self.num_cls)
        s = jnp.concatenate([x_sum[:, : self.num_cls].reshape(-1, self.dim), s])
        s = nn.distinct_rows(s, taken)
        for layer in range(self.num_layers):
            if layer:
                x_sum = self._part(FeatureSummary, layer, num_sums=self.num_sums)(x)
            x = self._with_sum(layer, x, s, sequences)
            x = self._interaction(layer)(x, train=train)
            longest = self.max_length + self.num_cls
            of_rows = self._part(SequenceLayer, layer, longest=longest)
            s = of_rows(s, x_sum, sequences, train=train)
        x = self._with_sum(self.num_layers, x, s, sequences)
        return jax.lax.collapse(x, 1)

    @linen.nowrap
    def _check(self, events: Any) -> None:
        if events.candidates is None:
            raise ValueError(
                "an InterFormer predicts one event of a sequence: set --data.targets "
                "last."
            )
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"--dim {self.dim} must be a multiple of {2 * self.num_heads}, twice "
                "--num-heads."
            )
        if self.num_cls > self.num_sums:
            raise ValueError(
                f"--num-cls {self.num_cls} are the first of --num-sums {self.num_sums}:"
                " lower it."
            )

    @linen.nowrap
    def _masked(self, fields: Float[Array, "C K d"], train: bool) -> Array:
        """Returns the fields, each number times what all fields make of it."""
        e = jax.lax.collapse(fields.astype(self.compute_dtype), 1)
        e = nn.normalize(e, "rms", train=train, name="mask_norm")
        mask = self._mlp("mask", (e.shape[1],), ends_linear=True)
        return (e * mask(e, train=train)).reshape(fields.shape)

    @linen.nowrap
    def _with_sum(
        self, layer: int, x: Array, s: Array, sequences: nn.Sequences
    ) -> Float[Array, "B m D"]:
        """Returns [X; S_sum]."""
        summary = self._part(
            SequenceSummary,
            layer,
            num_cls=self.num_cls,
            num_seeds=self.num_seeds,
            num_recent=self.num_recent,
        )
        return jnp.concatenate([x, summary(s, sequences)], axis=1)

    @linen.nowrap
    def _part(self, kind: type[Part], layer: int, **sizes: Any) -> Any:
        names = {FeatureSummary: "features", SequenceSummary: "history"}
        name = f"{names.get(kind, 'sequence')}_{layer}"
        return kind(**self.of_layers, **self.options, **sizes, name=name)

    @linen.nowrap
    def _interaction(self, layer: int) -> DhenLayer:
        return DhenLayer(
            **self.options,
            dot=self.num_embeddings,
            cross=self.num_embeddings,
            linear=None,
            attention=None,
            ensemble="sum",
            dot_mlp=self.dot_mlp,
            cross_rank=self.cross_rank,
            num_heads=1,
            dropout_rate=self.layer_dropout_rate,
            name=f"interaction_{layer}",
        )
