"""DHEN (Zhang et al., arXiv 2203.11014): a deep and hierarchical ensemble network.

    X_{i+1} = norm(ensemble_j U_j(X_i) + R X_i)      [B, n', d]

of modules that each make a number of embeddings, by W of m embeddings (n, m):

    dot         MLP({<x_i, x_j> : i > j}) as embeddings, its last layer linear
    cross       W^T (x * (W_c x + b) + x)            x = flat X; W_c of full or low rank
    linear      W^T X
    attention   W^T Z    Z = norm(H + FFN(H)), H = norm(X + SelfAttention(X))

The ensemble is a concatenation or a sum. R is the identity, or a linear map of
embeddings where their number changes. (The paper's cross has no skip connection; W^T X
adds a linear module to it, and it is one site of DCN V2.)

DhenDlrm is a mix of DHEN, DLRM and DCN V2 on the same embeddings:

    logit = head(top_mlp([flat X_L; <x_i, x_j> of X_0; cross_net(flat X_0)]))

B is the batch, n the number of embeddings, d their dimension.
"""

from typing import Literal

import jax
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.ranking import ModelPart
from loka_jax.models.stacked import StackedModel

Ensemble = Literal["concat", "sum"]


class DhenLayer(ModelPart, kw_only=True):
    """A layer of DHEN; its options are the model's."""

    dot: int | None
    cross: int | None
    linear: int | None
    attention: int | None
    ensemble: Ensemble
    dot_mlp: tuple[int, ...]
    cross_rank: int | None
    num_heads: int
    dropout_rate: float

    @linen.compact
    def __call__(
        self, x: Float[Array, "B n d"], *, train: bool = False
    ) -> Float[Array, "B m d"]:
        """Returns the embeddings of the ensemble.

        Raises:
            ValueError: if there is no module, or a sum of different numbers.
        """
        outputs = []
        if self.dot is not None:
            outputs.append(self._dot(x, self.dot, train))
        if self.cross is not None:
            cross = self._cross_net(1, self.cross_rank, "cross_net")
            crossed = cross(jax.lax.collapse(x, 1)).reshape(x.shape)
            outputs.append(self._compress("cross", crossed, self.cross))
        if self.linear is not None:
            outputs.append(self._compress("linear", x, self.linear))
        if self.attention is not None:
            attended = self._attend(x, train)
            outputs.append(self._compress("attention", attended, self.attention))
        parts = _ensemble(outputs, self.ensemble)
        count = sum(part.shape[1] for part in parts)
        if x.shape[1] != count:
            x = self._compress("residual", x, count)
        return self._join(parts, x, train=train)

    @linen.nowrap
    def _dot(self, x: Array, count: int, train: bool) -> Float[Array, "B m d"]:
        batch, _, dim = x.shape
        with jax.named_scope("interaction"):
            pairs = nn.dot_features(None, x, implementation=self.kernels)
        widths = (*self.dot_mlp, count * dim)
        mlp = self._mlp(
            "dot_mlp", widths, ends_linear=True, dropout_rate=self.dropout_rate
        )
        return mlp(pairs, train=train).reshape(batch, count, dim)

    @linen.nowrap
    def _attend(self, x: Array, train: bool) -> Float[Array, "B n d"]:
        dim = x.shape[2]
        attention = nn.SelfAttention(
            self.num_heads,
            recipe=self.recipe,
            use_bias=self.bias,
            name="self_attention",
        )
        h = self._normalize(x + attention(x), "attention_norm", train=train)
        mlp = self._mlp(
            "ffn", (2 * dim, dim), ends_linear=True, dropout_rate=self.dropout_rate
        )
        out = mlp(h.reshape(-1, dim), train=train).reshape(h.shape)
        return self._normalize(h + out, "ffn_norm", train=train)

    @linen.nowrap
    def _compress(self, name: str, x: Array, count: int) -> Float[Array, "B m d"]:
        return nn.Compress(count, recipe=self.recipe, name=name)(x)


def _ensemble(outputs: list[Array], ensemble: Ensemble) -> list[Array]:
    """Returns the parts of the embeddings that the modules make together."""
    counts = [x.shape[1] for x in outputs]
    if not outputs:
        raise ValueError(
            "DHEN has no module: set --dot, --cross, --linear or --attention."
        )
    if ensemble == "concat":
        return outputs
    if len(set(counts)) > 1:
        raise ValueError(
            f"--ensemble sum of modules that make {counts} embeddings: let all make "
            "the same number, or use --ensemble concat."
        )
    return [sum(outputs[1:], outputs[0])]


class Dhen(StackedModel):
    """DHEN, from gathered embeddings to a logit.

    Attributes:
        dot: embeddings that the module makes in each layer; None to leave it out.
        cross, linear, attention: likewise.
        ensemble: "concat" joins the modules' embeddings, "sum" adds them.
        dot_mlp: widths of the dot module's MLP before its last layer.
        cross_rank: rank of the cross module's weight; full if None.
        num_heads: heads of the attention module.
    """

    norm: nn.NormName = "layer"
    dot: int | None = 24
    cross: int | None = 24
    linear: int | None = 16
    attention: int | None = None
    ensemble: Ensemble = "concat"
    dot_mlp: tuple[int, ...] = (512,)
    cross_rank: int | None = None
    num_heads: int = 1

    @linen.nowrap
    def _layer(self, i: int) -> DhenLayer:
        return DhenLayer(
            **self.options,
            dot=self.dot,
            cross=self.cross,
            linear=self.linear,
            attention=self.attention,
            ensemble=self.ensemble,
            dot_mlp=self.dot_mlp,
            cross_rank=self.cross_rank,
            num_heads=self.num_heads,
            dropout_rate=self.layer_dropout_rate,
            name=f"layer_{i}",
        )


class DhenDlrm(Dhen):
    """The mix of DHEN, DLRM and DCN V2.

    Attributes:
        num_cross_layers: of the cross network, whose weights have the rank of the
            cross modules.
    """

    num_cross_layers: int = 2

    @linen.nowrap
    def _features(self, first: Array, last: Array) -> Float[Array, "B p"]:
        with jax.named_scope("interaction"):
            pairs = nn.dot_features(
                None, first, multiple=1, implementation=self.kernels
            )
        cross = self._cross_net(self.num_cross_layers, self.cross_rank, "cross_net")
        crossed = cross(jax.lax.collapse(first, 1))
        mixed = nn.join_features(jax.lax.collapse(last, 1), pairs, multiple=1)
        return nn.join_features(mixed, crossed)
