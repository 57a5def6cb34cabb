"""A dense layer, its norm and its activation as one site, and the hand-over in FP8.

On a Hopper GPU one kernel runs a `NormDense` whose shape it serves; elsewhere XLA does.
`list_sites` tells which, and why.
"""

import math
from collections.abc import Callable
from typing import get_args

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

from loka_jax.group import Group
from loka_jax.nn.context import current
from loka_jax.nn.dense import default_kernel_init, run_planned
from loka_jax.nn.norms import check_choice
from loka_jax.nn.sites import announce
from loka_jax.normed import ActivationName, NormName
from loka_jax.ops.plan import KernelPlan
from loka_jax.ops.products import Activations
from loka_jax.ops.run_site import SiteArrays
from loka_jax.recipe import Recipe
from loka_jax.site import PROVIDERS, Out, Provider, SiteSpec


class NormParameters(linen.Module):
    """The factors and summands of a norm, named `scale` and `bias` as Flax's.

    Attributes:
        norm: "layer" has both, "rms" a scale, others nothing.
        use_bias: "layer" has a bias.
        use_scale: "layer" and "rms" have a scale.
    """

    norm: NormName
    use_bias: bool = True
    use_scale: bool = True

    @linen.compact
    def __call__(self, features: int) -> tuple[Array | None, Array | None]:
        """Returns scale and bias, float32 of shape (features,), or None."""
        gamma = beta = None
        shape = (features,)
        if self.norm in ("layer", "rms") and self.use_scale:
            init = linen.initializers.ones_init()
            gamma = self.param("scale", init, shape, jnp.float32)
        if self.norm == "layer" and self.use_bias:
            init = linen.initializers.zeros_init()
            beta = self.param("bias", init, shape, jnp.float32)
        return gamma, beta


class NormDense(linen.Module):
    """A dense layer with its norm and activation, `y = act(norm(x W + b))`.

    Parameters are `kernel` (in, features), `bias` if asked for, and under `norm` the
    `scale` and `bias` of Flax's LayerNorm or RMSNorm. So a checkpoint of a Flax Dense
    and its norm becomes `{**dense, "norm": norm}`.

    Successive sites can hand their activations on in FP8:

        x = NormDense(512, out="fp8")(x)
        x = NormDense(256)(x)

    Attributes:
        features: width of the output.
        recipe: a name of `recipe.RECIPES`, or a `Recipe`.
        norm: "layer", "rms", "block" (`BlockNorm`) or "none".
        use_bias: add a bias before the norm; a norm with a shift makes it superfluous.
        norm_bias: give a "layer" norm its shift.
        epsilon: added to the variance or mean square.
        out: "compute" for an array in the compute dtype; "fp8" to hand rows of FP8 to
            the next site; "both" for that and an exact array beside it.
        implementation: the provider, or an error where it does not serve the site; None
            for Pallas kernels where they serve it on a Hopper GPU, else XLA.
        axis_names: mesh axes over which rows are spread, under `shard_map` only.
        group: as in `nn.Site`.
        norm_parameters: the module of scale and bias; a submodule `norm` if None.
        plan: of the site, if it was planned as part of a chain; else made here.
    """

    features: int
    recipe: str | Recipe = "fp8_tensorwise"
    norm: NormName = "layer"
    activation: ActivationName = "none"
    use_bias: bool = False
    norm_bias: bool = True
    epsilon: float = 1e-6
    out: Out = "compute"
    implementation: Provider | None = None
    kernel_init: Callable = default_kernel_init
    bias_init: Callable = linen.initializers.zeros_init()
    axis_names: tuple[str, ...] = ()
    group: Group | None = None
    norm_parameters: NormParameters | None = None
    plan: KernelPlan | None = None

    @linen.compact
    def __call__(
        self, inputs: Float[Array, "... k"] | Activations
    ) -> Float[Array, "... n"] | Activations:
        """Returns `activation(norm(inputs @ kernel + bias))` over the last dim.

        Raises:
            ValueError: if norm, activation, out or implementation is unknown.
        """
        check_choice("norm", self.norm, get_args(NormName))
        check_choice("activation", self.activation, get_args(ActivationName))
        check_choice("out", self.out, get_args(Out))
        check_choice("implementation", self.implementation, (*PROVIDERS, None))
        k, n = inputs.shape[-1], self.features
        kernel = self.param("kernel", self.kernel_init, (k, n), jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (n,), jnp.float32)
        parameters = self.norm_parameters or NormParameters(
            self.norm, self.norm_bias, name="norm"
        )
        gamma, beta = parameters(n)
        plan = self.plan or self._plan(inputs)
        announce(self, plan, group=self.group)
        arrays = SiteArrays(inputs, kernel, bias, gamma, beta)
        return run_planned(self, plan, arrays, epsilon=self.epsilon)

    def _plan(self, inputs: Array | Activations) -> KernelPlan:
        spec = SiteSpec(
            m=math.prod(inputs.shape[:-1]),
            k=inputs.shape[-1],
            n=self.features,
            norm=self.norm,
            activation=self.activation,
            use_bias=self.use_bias,
            fp8_in=inputs.scaling if isinstance(inputs, Activations) else None,
            out=self.out,
        )
        path = "/".join(self.path)
        return current().plan(path, spec, self.recipe, self.implementation)
