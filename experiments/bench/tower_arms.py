"""The arms of `tower.py`: dense layers with LayerNorm and swish, by Flax and by us."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen

from loka_jax import nn
from loka_jax.recipe import INITIALIZED, get_recipe
from loka_jax.site import Provider

FLAX, FLAX_BIAS, FLAX_FP8 = "flax bf16", "flax bf16 with bias", "flax fp8"
# Ours are "IMPLEMENTATION RECIPE": "auto" takes kernels where they serve, "pallas"
# refuses a site that they do not serve both ways.
IMPLEMENTATIONS: dict[str, Provider | None] = {
    "xla": "xla",
    "pallas": "pallas",
    "auto": None,
}
ARMS = (
    FLAX,
    FLAX_BIAS,
    FLAX_FP8,
    "xla fp8_tensorwise_delayed_bf16_drhs",
    "auto fp8_tensorwise_delayed_bf16_drhs",
    "auto fp8_rowwise_bf16_drhs",
    "auto bf16",
)


class Batch(NamedTuple):
    """Rows and their labels."""

    x: jax.Array
    labels: jax.Array


class State(NamedTuple):
    """What a training step changes."""

    variables: dict[str, Any]
    optimizer: optax.OptState


class FlaxLayers(linen.Module):
    """The tower's layers as Flax users write them."""

    features: tuple[int, ...]
    arm: str

    @linen.compact
    def __call__(self, x):
        """Returns the last layer's activations."""
        op = linen.Fp8DirectDotGeneralOp if self.arm == FLAX_FP8 else None
        for i, features in enumerate(self.features):
            x = linen.Dense(
                features,
                use_bias=self.arm == FLAX_BIAS,
                dtype=jnp.bfloat16,
                dot_general_cls=op,
                name=f"dense_{i}",
            )(x)
            x = linen.LayerNorm(dtype=jnp.bfloat16, name=f"norm_{i}")(x)
            x = jax.nn.swish(x)
        return x


class Tower(linen.Module):
    """The tower in one arm.

    Attributes:
        features: widths of the layers.
        arm: one of Flax's, or an implementation and a recipe of ours.
        scales_initialized: whether delayed scales are known to be set.
    """

    features: tuple[int, ...]
    arm: str
    scales_initialized: bool = False

    @linen.compact
    def __call__(self, x):
        """Returns a logit a row, float32."""
        x = self._layers()(x)
        logits = linen.Dense(1, dtype=jnp.bfloat16, name="head")(x)
        return logits[:, 0].astype(jnp.float32)

    def _layers(self) -> linen.Module:
        if is_flax(self.arm):
            return FlaxLayers(self.features, self.arm, name="layers")
        implementation, recipe = self.arm.split()
        if get_recipe(recipe).is_delayed and self.scales_initialized:
            recipe += INITIALIZED
        return nn.Mlp(
            self.features,
            recipe=recipe,
            norm="layer",
            activation="swish",
            implementation=IMPLEMENTATIONS[implementation],
            name="layers",
        )


class Arm(NamedTuple):
    """Compiled functions of one arm.

    Attributes:
        init: parameters and state from a key.
        first_step: the training step that also sets delayed scales.
        step: the training step after some of those.
        infer: logits of rows.
    """

    init: Callable[..., State]
    first_step: Callable[..., tuple[State, jax.Array]]
    step: Callable[..., tuple[State, jax.Array]]
    infer: Callable[..., jax.Array]


def is_flax(arm: str) -> bool:
    """Tells whether an arm is Flax's own."""
    return arm in (FLAX, FLAX_BIAS, FLAX_FP8)


def check_arm(arm: str) -> None:
    """Raises ValueError, with the reason, if there is no such arm."""
    implementation, _, recipe = arm.partition(" ")
    if is_flax(arm):
        return
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"arm {arm!r} is not Flax's, nor begins with one of {names}.")
    get_recipe(recipe)


def make_arm(name: str, inputs: int, features: tuple[int, ...]) -> Arm:
    """Returns the functions of an arm; every arm begins with the same kernels."""
    module = Tower(features, name)
    initialized = module.clone(scales_initialized=True)
    optimizer = optax.adam(1e-3)

    def init(key):
        rows = jnp.zeros((16, inputs))
        variables = dict(module.init(key, rows))
        flax = Tower(features, FLAX).init(key, rows)
        params = with_kernels_of(flax["params"], variables["params"])
        return State(variables | {"params": params}, optimizer.init(params))

    def step(module, state: State, batch: Batch):
        def mean_loss(variables):
            logits = module.apply(variables, batch.x)
            return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch.labels))

        loss, grads = jax.value_and_grad(mean_loss)(state.variables)
        params = state.variables["params"]
        updates, opt_state = optimizer.update(grads["params"], state.optimizer, params)
        # The "gradient" of scaling state is its next value.
        variables = dict(grads) | {"params": optax.apply_updates(params, updates)}
        return State(variables, opt_state), loss

    def jitted_step(module):
        return jax.jit(functools.partial(step, module), donate_argnums=0)

    first_step = jitted_step(module)
    uses_history = not is_flax(name) and get_recipe(name.split()[1]).is_delayed
    return Arm(
        init=jax.jit(init),
        first_step=first_step,
        step=jitted_step(initialized) if uses_history else first_step,
        infer=jax.jit(initialized.apply),
    )


def with_kernels_of(source, params):
    """Returns `params` with the kernels of `source`, in the order of their paths.

    Arms name their layers differently. What else there is begins with zeros or ones.
    """
    kernels = iter(x for path, x in _leaves(source) if _is_kernel(path))
    leaves = [next(kernels) if _is_kernel(path) else x for path, x in _leaves(params)]
    for (_, old), new in zip(_leaves(params), leaves, strict=True):
        assert old.shape == new.shape, (old.shape, new.shape)
    assert next(kernels, None) is None
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def _is_kernel(path) -> bool:
    return path[-1].key == "kernel"
