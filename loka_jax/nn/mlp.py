"""A chain of sites: dense, norm, activation, dropout."""

from collections.abc import Callable

from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.dense import Dense, default_kernel_init
from loka_jax.nn.norms import ActivationName, NormName, activation, normalize
from loka_jax.recipe import Recipe


class Mlp(linen.Module):
    """A multi-layer perceptron; every layer is `dropout(act(norm(x W + b)))`.

    Attributes:
        features: widths of the layers.
        recipe: of all its sites.
        norm: norm of every layer; with one, the dense layers have no bias (a norm with
            a shift replaces it).
        activation: after every layer, the last included.
        dropout_rate: share of activations set to zero in training.
        kernel_init: initializer of the kernels.
    """

    features: tuple[int, ...]
    recipe: str | Recipe = "fp8_tensorwise"
    norm: NormName = "none"
    activation: ActivationName = "relu"
    dropout_rate: float = 0.0
    kernel_init: Callable = default_kernel_init

    @linen.compact
    def __call__(
        self, x: Float[Array, "B k"], *, train: bool = False
    ) -> Float[Array, "B n"]:
        """Returns the last layer's activations. Training with dropout needs its rng."""
        act = activation(self.activation)
        for i, features in enumerate(self.features):
            x = Dense(
                features,
                recipe=self.recipe,
                use_bias=self.norm == "none",
                kernel_init=self.kernel_init,
                name=f"dense_{i}",
            )(x)
            x = act(normalize(x, self.norm, train=train, name=f"norm_{i}"))
            x = linen.Dropout(self.dropout_rate, deterministic=not train)(x)
        return x
