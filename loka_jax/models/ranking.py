"""What all ranking models share: precision, norms, and the dtype of their inputs."""

from typing import Literal

from flax import linen
from jax.typing import DTypeLike

from loka_jax import nn
from loka_jax.recipe import get_recipe


class RankingModel(linen.Module):
    """Base of the ranking models: from dense features and embeddings to a logit.

    Attributes:
        recipe: precision of every site but the head, which is float32: a logit in
            bfloat16 would cost more NE than FP8 does. One of bf16, f32, fp8_tensorwise,
            fp8_tensorwise_delayed, fp8_tensorwise_delayed_bf16_drhs, fp8_rowwise,
            fp8_rowwise_bf16_drhs, fp8_blockwise.
        norm: norm of every layer of the MLPs.
        activation: activation of every layer of the MLPs.
        dropout_rate: dropout rate of the last MLP.
        implementation: "xla" to use XLA only; None to use kernels where they apply.
    """

    recipe: str = "fp8_tensorwise"
    norm: nn.NormName = "none"
    activation: nn.ActivationName = "relu"
    dropout_rate: float = 0.0
    implementation: Literal["xla"] | None = None

    @property
    def compute_dtype(self) -> DTypeLike:
        """The dtype to which the inputs are cast first."""
        return get_recipe(self.recipe).compute_dtype

    @linen.nowrap
    def _mlp(self, name: str, features: tuple[int, ...], dropout_rate: float) -> nn.Mlp:
        """Returns an MLP with the model's precision, norm and activation."""
        return nn.Mlp(
            features,
            recipe=self.recipe,
            norm=self.norm,
            activation=self.activation,
            dropout_rate=dropout_rate,
            implementation=self.implementation,
            name=name,
        )
