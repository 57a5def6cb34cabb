"""A chain of sites: dense, norm, activation, dropout."""

from collections.abc import Callable
from typing import Any

from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.dense import Dense, default_kernel_init
from loka_jax.nn.norm_dense import NormDense, NormParameters
from loka_jax.nn.norms import ActivationName, NormName, activation, normalize
from loka_jax.nn.overrides import choice_at
from loka_jax.normed import NormName as SiteNormName
from loka_jax.ops.dense_norm import Activations, Implementation, Out
from loka_jax.ops.plan import hand_over, plan
from loka_jax.ops.products import takes_handed
from loka_jax.recipe import Recipe


class Mlp(linen.Module):
    """A multi-layer perceptron; every layer is `dropout(act(norm(x W + b)))`.

    A layer is one site, `NormDense`, unless its norm is over the batch. Where kernels
    serve two layers in a row, the first hands its activations on in FP8.

    Attributes:
        features: widths of the layers.
        recipe: of all its sites.
        norm: norm of every layer; with one, the dense layers have no bias (a norm with
            a shift replaces it).
        activation: after every layer, the last included.
        dropout_rate: share of activations set to zero in training.
        kernel_init: initializer of the kernels.
        implementation: "xla" or "pallas" for all layers, see `NormDense`.
        interpret: how to interpret the kernels on a CPU.
    """

    features: tuple[int, ...]
    recipe: str | Recipe = "fp8_tensorwise"
    norm: NormName = "none"
    activation: ActivationName = "relu"
    dropout_rate: float = 0.0
    kernel_init: Callable = default_kernel_init
    implementation: Implementation | None = None
    interpret: Any = None

    @linen.compact
    def __call__(
        self, x: Float[Array, "B k"], *, train: bool = False
    ) -> Float[Array, "B n"]:
        """Returns the last layer's activations. Training with dropout needs its rng."""
        drops = train and self.dropout_rate > 0
        outs = self._outs(*x.shape)
        out: Array | Activations = x
        for i in range(len(self.features)):
            if self.norm == "batch":
                assert not isinstance(out, Activations)
                out = self._batch_norm_layer(i, out, train)
            else:
                out = self._site(i, self.norm, "compute" if drops else outs[i])(out)
            if drops:
                out = linen.Dropout(self.dropout_rate, deterministic=False)(out)
        assert not isinstance(out, Activations)
        return out

    def _site(self, i: int, norm: SiteNormName, out: Out) -> NormDense:
        return NormDense(
            self.features[i],
            recipe=self.recipe,
            norm=norm,
            activation=self.activation,
            use_bias=norm == "none",
            out=out,
            follows=i > 0 and self.dropout_rate == 0,
            implementation=self.implementation,
            kernel_init=self.kernel_init,
            norm_parameters=NormParameters(norm, name=f"norm_{i}"),
            interpret=self.interpret,
            name=f"dense_{i}",
        )

    def _batch_norm_layer(self, i: int, x: Array, train: bool) -> Array:
        x = Dense(
            self.features[i],
            recipe=self.recipe,
            use_bias=False,
            kernel_init=self.kernel_init,
            name=f"dense_{i}",
        )(x)
        act = activation(self.activation)
        return act(normalize(x, "batch", train=train, name=f"norm_{i}"))

    def _outs(self, m: int, k: int) -> list[Out]:
        """Returns in which form each layer hands its activations on.

        In FP8 where kernels run that layer and the next, and the next reads FP8.
        """
        outs: list[Out] = []
        if self.norm == "batch":
            return outs
        is_served = False
        for i, n in enumerate(self.features):
            path = "/".join((*self.path, f"dense_{i}"))
            recipe, implementation = choice_at(path, self.recipe, self.implementation)
            chosen = plan(
                recipe,
                m,
                k,
                n,
                norm=self.norm,
                activation=self.activation,
                out="fp8",
                has_bias=self.norm == "none",
                handed=hand_over(self.norm),
                implementation=implementation,
            )
            reads = takes_handed(recipe, chosen.padded_rows(m), k, n)
            if is_served and chosen.is_served and reads:
                outs[-1] = "fp8"
            is_served, k = chosen.is_served, n
            outs.append("compute")
        return outs
