"""DCN V2 (Wang et al., arXiv 2008.13535): a cross and a deep network.

    x_0     = [e_1; ...; e_F; d]                            [B, F D + n]
    x_{l+1} = x_0 * (W_l x_l + b_l) + x_l                   cross network, eq. 1
    logit   = head([x_L; deep_mlp(x_0)])                    [B]   (parallel structure)

B is the batch, F the number of categorical features, D the embedding dimension; d are
the n dense features themselves, or bottom_mlp(dense) of width n = D, as in the DCN V2
of the MLPerf benchmark (torchrec's DLRM_DCN):

    logit   = head(deep_mlp(x_L))                           [B]   (stacked structure)
"""

from typing import Literal

import jax
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.ranking import RankingModel


class Dcnv2(RankingModel):
    """A deep and cross network, from gathered embeddings to a logit.

    Attributes:
        bottom_mlp: widths of the dense features' MLP before its last layer of width D;
            None to take them as they are.
        num_cross_layers: number of cross layers.
        cross_rank: rank of the cross layers' weights; full if None.
        deep_mlp: widths of the deep network.
        structure: "parallel" feeds both networks with x_0; "stacked" feeds the deep
            network with the cross network's output.
    """

    bottom_mlp: tuple[int, ...] | None = None
    num_cross_layers: int = 3
    cross_rank: int | None = None
    deep_mlp: tuple[int, ...] = (512, 512, 256)
    structure: Literal["parallel", "stacked"] = "parallel"

    @linen.compact
    def __call__(
        self,
        dense_features: Float[Array, "B n"],
        embeddings: Float[Array, "B F D"],
        *,
        train: bool = False,
    ) -> Float[Array, "B"]:
        """Returns float32 logits."""
        dim = embeddings.shape[2]
        flat = jax.lax.collapse(embeddings.astype(self.compute_dtype), 1)
        bottom = dense_features.astype(flat.dtype)
        if self.bottom_mlp is not None and bottom.shape[1]:
            mlp = self._mlp("bottom_mlp", (*self.bottom_mlp, dim))
            bottom = mlp(bottom, train=train)
        cross = self._cross_net(self.num_cross_layers, self.cross_rank, "cross")
        deep = self._mlp("deep_mlp", self.deep_mlp, dropout_rate=self.dropout_rate)
        head = nn.Head(recipe="f32", kernel_init=self.head_init, name="head")
        networks = nn.CrossDeep(cross, deep, head, self.structure)
        logits = networks((flat, bottom), train=train)[:, 0]
        return self._with_first_order(logits, dense_features, embeddings)
