"""DLRM (Naumov et al., arXiv 1906.00091).

    d = bottom_mlp(dense)                            [B, D]
    z = [d; e_1; ...; e_F]                           [B, F + 1, D]
    p = {<z_i, z_j> : i > j}                         [B, F (F + 1) / 2]
    logit = head(top_mlp([d; p]))                    [B]

B is the batch, F the number of categorical features, D the embedding dimension.
"""

from typing import Literal

import jax
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.ranking import RankingModel


class DlrmFeatures(RankingModel):
    """The part of DLRM before its top MLP.

    Attributes:
        bottom_mlp: widths of the dense features' MLP before its last layer of width D;
            unused if there are no dense features.
        interaction: "dot" for pairwise dot products, "cat" for plain concatenation.
    """

    bottom_mlp: tuple[int, ...] = (512, 256)
    interaction: Literal["dot", "cat"] = "dot"

    @linen.nowrap
    def _features(
        self,
        dense_features: Float[Array, "B n"],
        embeddings: Float[Array, "B F D"],
        train: bool,
    ) -> Float[Array, "B p"]:
        """Returns [d; p], or [d; e_1; ...; e_F], padded."""
        dim = embeddings.shape[2]
        embeddings = embeddings.astype(self.compute_dtype)
        bottom = None
        if dense_features.shape[1]:
            bottom = self._mlp("bottom_mlp", (*self.bottom_mlp, dim))(
                dense_features.astype(embeddings.dtype), train=train
            )  # [B, D]

        if self.interaction == "cat":
            return nn.join_features(bottom, jax.lax.collapse(embeddings, 1))
        with jax.named_scope("interaction"):
            return nn.dot_features(bottom, embeddings, implementation=self.kernels)


class Dlrm(DlrmFeatures):
    """A deep learning recommendation model, from gathered embeddings to a logit.

    Attributes:
        top_mlp: widths of the MLP after the interaction.
    """

    top_mlp: tuple[int, ...] = (512, 512, 256)

    @linen.compact
    def __call__(
        self,
        dense_features: Float[Array, "B n"],
        embeddings: Float[Array, "B F D"],
        *,
        train: bool = False,
    ) -> Float[Array, "B"]:
        """Returns float32 logits."""
        features = self._features(dense_features, embeddings, train)
        # [B, D + F (F + 1) / 2 or (F + 1) D, padded]
        mlp = self._mlp("top_mlp", self.top_mlp, dropout_rate=self.dropout_rate)
        head = nn.Dense(1, recipe="f32", kernel_init=self.head_init, name="head")
        logits = head(mlp(features, train=train))[:, 0]
        return self._with_first_order(logits, dense_features, embeddings)
