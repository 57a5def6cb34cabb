"""What models share that stack interactions of embeddings, such as Wukong and DHEN.

    X_0     = [bottom_mlp(dense); e_1; ...; e_F]     [B, n, d]
    X_{i+1} = layer_i(X_i)                           [B, n', d]
    logit   = head(top_mlp(flat X_L))                [B]

B is the batch, n the number of embeddings, d their dimension. The bottom MLP makes
several embeddings of the dense features, and a field has several in a row of its table.
"""

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.ranking import RankingModel


class StackedModel(RankingModel):
    """From dense features and embeddings, by layers of interactions, to a logit.

    Attributes:
        bottom_mlp: widths of the dense features' MLP before its last layer.
        dense_embeddings: embeddings that it makes; none if there are no dense features.
        embeddings_per_field: e; a row of a table holds e embeddings.
        num_layers: L.
        top_mlp: widths of the MLP after the last layer.
        layer_dropout_rate: dropout rate of the MLPs within layers, their last, linear
            layer included.
    """

    bottom_mlp: tuple[int, ...] = (512, 256)
    dense_embeddings: int = 1
    embeddings_per_field: int = 1
    num_layers: int = 2
    top_mlp: tuple[int, ...] = (512, 256)
    layer_dropout_rate: float = 0.0

    @linen.compact
    def __call__(
        self,
        dense_features: Float[Array, "B n"],
        embeddings: Float[Array, "B F D"],
        *,
        train: bool = False,
    ) -> Float[Array, "B"]:
        """Returns float32 logits.

        Raises:
            ValueError: if D is no multiple of the embeddings per field.
        """
        x = first = self._first(dense_features, embeddings, train)
        for i in range(self.num_layers):
            x = self._layer(i)(x, train=train)
        features = self._features(first, x)
        mlp = self._mlp("top_mlp", self.top_mlp, dropout_rate=self.dropout_rate)
        head = nn.Dense(1, recipe="f32", kernel_init=self.head_init, name="head")
        logits = head(mlp(features, train=train))[:, 0]
        return self._with_first_order(logits, dense_features, embeddings)

    @linen.nowrap
    def _first(self, dense_features, embeddings, train: bool) -> Float[Array, "B n d"]:
        batch, fields, width = embeddings.shape
        dim, rest = divmod(width, self.embeddings_per_field)
        if rest:
            raise ValueError(
                f"--embedding.dim {width} must be a multiple of --embeddings-per-field "
                f"{self.embeddings_per_field}."
            )
        count = fields * self.embeddings_per_field
        x = embeddings.astype(self.compute_dtype).reshape(batch, count, dim)
        if not dense_features.shape[1]:
            return x
        mlp = self._mlp("bottom_mlp", (*self.bottom_mlp, self.dense_embeddings * dim))
        bottom = mlp(dense_features.astype(x.dtype), train=train)
        bottom = bottom.reshape(batch, self.dense_embeddings, dim)
        return jnp.concatenate([bottom, x], axis=1)

    @linen.nowrap
    def _layer(self, i: int) -> linen.Module:
        """Returns layer i, from embeddings to embeddings."""
        raise NotImplementedError

    @linen.nowrap
    def _features(self, first: Array, last: Array) -> Float[Array, "B p"]:
        """Returns the top MLP's input, of the first and the last embeddings."""
        del first
        return jax.lax.collapse(last, 1)
