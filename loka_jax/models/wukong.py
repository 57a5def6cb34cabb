"""Wukong (Zhang et al., arXiv 2403.02545): stacked factorization machines.

    FM(X)   = X X^T Y                                           [n, k]     eq. 3
    FMB(X)  = MLP(norm(flat FM(X))) as embeddings               [n_F, d]   eq. 2
    LCB(X)  = W_L^T X                                           [n_L, d]   eq. 4
    X_{i+1} = norm([FMB(X_i); LCB(X_i)] + R X_i)                [n', d]    eq. 1

Y is learned, or attentive: of an example's own,

    Y       = MLP(flat C^T X) as a matrix                       [n, k]

R is the identity, or a linear map of embeddings where n' = n_F + n_L is not n. The last
layer of both MLPs is linear. Where the norm is BlockNorm, that of eq. 2 is an RMSNorm
of the whole row without a scale: blocks hide how large the FM of one embedding is
beside that of another, which cost 0.04 % of NE (docs/models.md, "Mods").
"""

import jax
from flax import linen
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.models.ranking import ModelPart
from loka_jax.models.stacked import StackedModel


class WukongLayer(ModelPart, kw_only=True):
    """A layer of Wukong; its options are the model's."""

    fm_embeddings: int
    lcb_embeddings: int
    k: int
    fmb_mlp: tuple[int, ...]
    attention_mlp: tuple[int, ...] | None
    attention_embeddings: int
    dropout_rate: float

    @linen.compact
    def __call__(
        self, x: Float[Array, "B n d"], *, train: bool = False
    ) -> Float[Array, "B m d"]:
        """Returns n_F + n_L embeddings."""
        batch, n, d = x.shape
        with jax.named_scope("interaction"):
            count = self.fm_embeddings + self.lcb_embeddings
            fm, lcb, residual = self._fm_lcb(x, train)
            flat, norm = jax.lax.collapse(fm, 1), None
            if self.norm == "block":
                norm = nn.NormParameters("rms", use_scale=False, name="fm_norm")
            elif self.norm in ("layer", "rms"):
                norm = nn.NormParameters(self.norm, self.bias, name="fm_norm")
            else:
                flat = self._normalize(flat, "fm_norm", train=train)
        widths = (*self.fmb_mlp, self.fm_embeddings * d)
        mlp = self._mlp(
            "fmb",
            widths,
            ends_linear=True,
            input_norm=norm,  # groups normalize while they cast
            dropout_rate=self.dropout_rate,
        )
        fmb = mlp(flat, train=train)
        with jax.named_scope("interaction"):
            if n != count:
                compress = nn.Compress(count, recipe=self.recipe, name="residual")
                residual = compress(x)
            parts = [fmb.reshape(batch, self.fm_embeddings, d), lcb]
            return self._join(parts, residual, train=train)

    @linen.nowrap
    def _fm_lcb(
        self, x: Array, train: bool
    ) -> tuple[Array, Array, Array | nn.Residual]:
        """Returns FM [B, n, k], LCB [B, n_L, d], and x for the sum with them."""
        batch, n, d = x.shape
        if self.attention_mlp is None:
            joined = self.fm_embeddings, self.lcb_embeddings
            if n != sum(joined) or not self._is_joined(d):
                joined = ()
            return nn.FmLcb(
                self.k,
                self.lcb_embeddings,
                recipe=self.recipe,
                implementation=self.kernels,
                name="fm_lcb",
            )(x, joined)
        seen = nn.Compress(
            self.attention_embeddings, recipe=self.recipe, name="attended"
        )(x)
        widths = (*self.attention_mlp, n * self.k)
        mlp = self._mlp("attention", widths, ends_linear=True)
        y = mlp(jax.lax.collapse(seen, 1), train=train).reshape(batch, n, self.k)
        lcb = nn.Compress(self.lcb_embeddings, recipe=self.recipe, name="lcb")(x)
        return nn.Fm(recipe=self.recipe, name="fm")(x, y), lcb, x


class Wukong(StackedModel):
    """Wukong, from gathered embeddings to a logit.

    Attributes:
        fm_embeddings: n_F, embeddings that a layer makes by its FMB.
        lcb_embeddings: n_L, embeddings that it makes by its LCB.
        k: columns of Y.
        fmb_mlp: widths of the FMB's MLP before its last layer.
        attention_mlp: widths of the MLP of an attentive Y before its last layer; None
            for a learned Y.
        attention_embeddings: columns of C, embeddings that this MLP reads.
    """

    norm: nn.NormName = "layer"
    fm_embeddings: int = 16
    lcb_embeddings: int = 16
    k: int = 24
    fmb_mlp: tuple[int, ...] = (512, 512)
    attention_mlp: tuple[int, ...] | None = None
    attention_embeddings: int = 8

    @linen.nowrap
    def _layer(self, i: int) -> WukongLayer:
        return WukongLayer(
            **self.options,
            fm_embeddings=self.fm_embeddings,
            lcb_embeddings=self.lcb_embeddings,
            k=self.k,
            fmb_mlp=self.fmb_mlp,
            attention_mlp=self.attention_mlp,
            attention_embeddings=self.attention_embeddings,
            dropout_rate=self.layer_dropout_rate,
            name=f"layer_{i}",
        )
