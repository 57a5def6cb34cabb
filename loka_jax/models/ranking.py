"""What all ranking models share: precision, norms, and the dtype of their inputs."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import nn
from loka_jax.nn.context import as_recipe

FIRST_ORDER = "first_order"  # the dense features' weights, among the parameters


class ModelPart(linen.Module):
    """Base of models and of their layers: the options that hold everywhere.

    LoKA's Mods are `bias=False`, `norm="block"` and `activation="hard_swish"`.

    Attributes:
        recipe: precision of every site but the head, which is float32: a logit in
            bfloat16 would cost more NE than FP8 does. One of bf16, f32, fp8_tensorwise,
            fp8_tensorwise_delayed, fp8_tensorwise_delayed_bf16_drhs, fp8_rowwise,
            fp8_rowwise_bf16_drhs, fp8_blockwise, mxfp8.
        norm: norm of every layer: of the MLPs, and of the interactions that have one.
        activation: activation of every layer of the MLPs.
        bias: every dense layer, or its norm, has a bias; the head always has one.
        implementation: "xla" to use XLA only; "group" to run the layers of MLPs and of
            cross networks in groups; None to use kernels where they apply.
    """

    recipe: str = "fp8_tensorwise"
    norm: nn.NormName = "none"
    activation: nn.ActivationName = "relu"
    bias: bool = True
    implementation: Literal["xla", "group"] | None = None

    @property
    def compute_dtype(self) -> DTypeLike:
        """The dtype to which the inputs are cast first."""
        return as_recipe(self.recipe).compute_dtype

    @property
    def kernels(self) -> Literal["xla"] | None:
        """The implementation of operations that are no groups."""
        return "xla" if self.implementation == "xla" else None

    @property
    def options(self) -> dict[str, Any]:
        """The options above, for a part of this one."""
        names = "recipe", "norm", "activation", "bias", "implementation"
        return {name: getattr(self, name) for name in names}

    @linen.nowrap
    def _mlp(self, name: str, features: tuple[int, ...], **options: Any) -> nn.Mlp:
        return nn.Mlp(
            features,
            recipe=self.recipe,
            norm=self.norm,
            activation=self.activation,
            use_bias=self.bias,
            implementation=self.implementation,
            name=name,
            **options,
        )

    @linen.nowrap
    def _cross_net(self, num_layers: int, rank: int | None, name: str) -> nn.CrossNet:
        return nn.CrossNet(
            num_layers,
            rank=rank,
            use_bias=self.bias,
            recipe=self.recipe,
            implementation=self.implementation,
            name=name,
        )

    @linen.nowrap
    def _is_joined(self, d: int) -> bool:
        """Returns whether `_join` is one operation for embeddings of d values."""
        is_served = self.norm in ("block", "layer", "rms") and d <= nn.BlockNorm.block
        if self.implementation is None:
            return is_served and nn.runs_tails()
        return is_served and self.implementation == "group"

    @linen.nowrap
    def _join(
        self, parts: list[jax.Array], x: jax.Array | nn.Residual, *, train: bool
    ) -> Float[Array, "B n d"]:
        """Returns the norm of the parts' embeddings plus x."""
        if isinstance(x, nn.Residual) or self._is_joined(x.shape[2]):
            assert self.norm != "batch"
            return nn.JoinedNorm(self.norm, self.bias, name="norm")(tuple(parts), x)
        out = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
        return self._normalize(out + x, "norm", train=train)

    @linen.nowrap
    def _normalize(self, x: jax.Array, name: str, *, train: bool) -> jax.Array:
        return nn.normalize(x, self.norm, train=train, use_bias=self.bias, name=name)


class RankingModel(ModelPart):
    """Base of the ranking models: from dense features and embeddings to a logit.

    Attributes:
        takes_events: it is called with the events of an event log, too.
        dropout_rate: dropout rate of the last MLP.
        first_order: adds a logistic regression to the logit, `u . x + sum_f e_f[0]`:
            the first number of a value's embedding is its weight, of task t the t-th.
            Heads are 0 at the start, so that the regression is the whole model then.
            Training begins at the one fitted to the rows, where these are files.
    """

    takes_events: ClassVar[bool] = False

    dropout_rate: float = 0.0
    first_order: bool = False

    @property
    def head_init(self) -> Callable:
        """The initial values of heads' kernels."""
        zeros = linen.initializers.zeros_init()
        return zeros if self.first_order else nn.dense.default_kernel_init

    @linen.nowrap
    def _with_first_order(
        self,
        logits: Float[Array, "B"] | Float[Array, "B T"],
        dense_features: Float[Array, "B n"],
        embeddings: Float[Array, "B F D"],
    ) -> Float[Array, "B"] | Float[Array, "B T"]:
        """Returns the logits, with those of a regression if there is one."""
        if not self.first_order:
            return logits
        tasks = 1 if logits.ndim == 1 else logits.shape[1]
        linear = embeddings[..., :tasks].astype(jnp.float32).sum(axis=1)
        if dense_features.shape[1]:
            linear += nn.Dense(
                tasks,
                recipe="f32",
                use_bias=False,
                kernel_init=linen.initializers.zeros_init(),
                name=FIRST_ORDER,
            )(dense_features.astype(jnp.float32))
        return logits + linear.reshape(logits.shape)
