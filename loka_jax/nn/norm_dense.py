"""A dense layer, its norm and its activation as one site, and the hand-over in FP8.

On a Hopper GPU one kernel runs what `NormDense` holds, where it serves the shape; XLA
runs it elsewhere. `list_sites` tells which, and why.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax.nn.dense import default_kernel_init, site_state
from loka_jax.nn.overrides import site_choice
from loka_jax.nn.probing import site_tap
from loka_jax.nn.sites import announce
from loka_jax.normed import ActivationName, NormName
from loka_jax.ops.dense_norm import (
    Activations,
    Implementation,
    Out,
    dense_norm,
    plan,
)
from loka_jax.recipe import Recipe


class NormParameters(linen.Module):
    """The factors and summands of a norm, named `scale` and `bias` as Flax's.

    Attributes:
        norm: "layer" has both, "rms" a scale, others nothing.
    """

    norm: NormName

    @linen.compact
    def __call__(self, features: int) -> tuple[Array | None, Array | None]:
        """Returns scale and bias, float32 of shape (features,), or None."""
        gamma = beta = None
        shape = (features,)
        if self.norm in ("layer", "rms"):
            init = linen.initializers.ones_init()
            gamma = self.param("scale", init, shape, jnp.float32)
        if self.norm == "layer":
            init = linen.initializers.zeros_init()
            beta = self.param("bias", init, shape, jnp.float32)
        return gamma, beta


class NormDense(linen.Module):
    """A dense layer with its norm and activation, `y = act(norm(x W + b))`.

    Parameters are `kernel` (in, features), `bias` if asked for, and under `norm` the
    `scale` and `bias` of Flax's LayerNorm or RMSNorm. So a checkpoint of a Flax Dense
    and its norm becomes `{**dense, "norm": norm}`.

    Sites in a row need no wide activations between them:

        x = NormDense(512, out="fp8")(x)
        x = NormDense(256)(x)

    Attributes:
        features: width of the output.
        recipe: a name of `recipe.RECIPES`, or a `Recipe`.
        norm: "layer", "rms", "block" (`BlockNorm`) or "none".
        activation: applied last.
        use_bias: add a bias before the norm; a norm with a shift makes it superfluous.
        epsilon: added to the variance or mean square.
        out: "compute" for an array in the compute dtype; "fp8" to hand rows of FP8 to
            the next site; "both" for that and an exact array beside it.
        implementation: "xla"; "pallas" for kernels, or an error; None for kernels where
            there is a Hopper GPU and they serve the site.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        axis_names: mesh axes over which rows are spread, under `shard_map` only.
        follows: the site before hands its activations to this one alone, as they are,
            which makes both a chain for Dispatch.
        norm_parameters: where scale and bias live, if not here.
        interpret: how to interpret the kernels on a CPU, see `ops.dense_norm`.
    """

    features: int
    recipe: str | Recipe = "fp8_tensorwise"
    norm: NormName = "layer"
    activation: ActivationName = "none"
    use_bias: bool = False
    epsilon: float = 1e-6
    out: Out = "compute"
    implementation: Implementation | None = None
    kernel_init: Callable = default_kernel_init
    bias_init: Callable = linen.initializers.zeros_init()
    axis_names: tuple[str, ...] = ()
    follows: bool = False
    norm_parameters: NormParameters | None = None
    interpret: Any = None

    @linen.compact
    def __call__(
        self, inputs: Float[Array, "... k"] | Activations
    ) -> Float[Array, "... n"] | Activations:
        """Returns `activation(norm(inputs @ kernel + bias))` over the last dim."""
        *leading, k = inputs.shape
        n = self.features
        kernel = self.param("kernel", self.kernel_init, (k, n), jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (n,), jnp.float32)
        gamma, beta = (self.norm_parameters or NormParameters(self.norm, name="norm"))(
            n
        )
        recipe, implementation = site_choice(self, self.recipe, self.implementation)
        m = 1
        for size in leading:
            m *= size
        handed = inputs.scaling if isinstance(inputs, Activations) else None
        chosen = plan(
            recipe,
            m,
            k,
            n,
            norm=self.norm,
            activation=self.activation,
            out=self.out,
            has_bias=self.use_bias,
            handed=handed,
            implementation=implementation,
        )
        path = "/".join(self.path)
        announce(
            path,
            m,
            k,
            n,
            recipe,
            None,
            chosen=chosen,
            handed=handed,
            norm=self.norm,
            activation=self.activation,
            use_bias=self.use_bias,
            follows=self.follows,
            engine="triton" if implementation == "triton" else "xla",
        )
        recipe, state = site_state(self, recipe, k, n)
        observe = site_tap(self, m, k, n, state, recipe, self.axis_names)
        return dense_norm(
            inputs,
            kernel,
            bias=bias,
            gamma=gamma,
            beta=beta,
            norm=self.norm,
            activation=self.activation,
            epsilon=self.epsilon,
            recipe=recipe,
            state=state,
            out=self.out,
            implementation=implementation,
            axis_names=self.axis_names,
            interpret=self.interpret,
            observe=observe,
        )
