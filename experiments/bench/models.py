"""The models that are timed, and how they are run: plans, inputs, scales, a pass."""

import itertools
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import optax
from flax import linen

from experiments.configs import get_config
from loka_jax import nn
from loka_jax.data.planted import NUM_DENSE
from loka_jax.measure.compiling import untuned_here
from loka_jax.measure.roofline import Roofline
from loka_jax.models import Dlrm
from loka_jax.nn import OVERWRITE_WITH_GRADIENT
from loka_jax.site import Choice, Provider

MLPERF_DLRM = Dlrm(bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512, 256), recipe="bf16")
# LoKA's Mods, one by one.
type Mod = Literal["no_bias", "block", "hard_swish"]
MODS: dict[str, dict[str, Any]] = {
    "no_bias": {"bias": False},
    "block": {"norm": "block"},
    "hard_swish": {"activation": "hard_swish"},
}

type Shapes = tuple[tuple[int, ...], ...]

_TOWER = 3072, 3072, 1536  # features that a tower reads, and those of its layers


class Tower(linen.Module):
    """Layers alone; the logit is the mean of the last one's activations.

    Attributes:
        sizes: the features that it reads, and those of its layers.
    """

    norm: nn.NormName
    sizes: tuple[int, ...] = _TOWER
    recipe: str = "bf16"
    implementation: Provider | None = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of rows."""
        layers = nn.Mlp(
            self.sizes[1:],
            recipe=self.recipe,
            norm=self.norm,
            activation="swish",
            implementation=self.implementation,
        )
        return layers(x).astype(jnp.float32).mean(axis=1)

    def least_us(
        self, rows: int, roofline: Roofline, *, is_training: bool, is_fp8: bool
    ) -> float:
        """Returns the microseconds that its products take at the limits of a device.

        Each moves its operands, in FP8 or in bfloat16, and its result once, or takes as
        long as its FLOPs; all else is free.
        """
        rate = roofline.fp8_flops_per_us if is_fp8 else roofline.bf16_flops_per_us
        total, num_bytes = 0.0, 1 if is_fp8 else 2
        for k, n in itertools.pairwise(self.sizes):
            x, y, weight = rows * k, rows * n, k * n
            moved = [num_bytes * (x + weight) + num_bytes * y]
            if (
                is_training
            ):  # gradients of activations in bfloat16, of weights in float32
                moved += [
                    num_bytes * (y + weight) + 2 * x,
                    num_bytes * (x + y) + 4 * weight,
                ]
            flops_us = 2 * rows * k * n / rate
            total += sum(max(flops_us, each / roofline.bytes_per_us) for each in moved)
        return total


def wide(name: str) -> tuple[linen.Module, Callable[[int], Shapes]]:
    """Returns the dense part of a wide model, and its inputs' shapes for m rows.

    Args:
        name: of a configuration `fp8_NAME`, with all Mods but for the
            MLPerf benchmark's; "NAME MOD" has one of `MODS` alone, "NAME plain" none.
            Where hard_swish is missing there is swish, which it replaces. "tower NORM"
            is a `Tower`, "tower NORM WIDTH" one of three layers of a width.

    Raises:
        ValueError: if there is no such configuration or Mod.
    """
    config_name, _, mod = name.partition(" ")
    if config_name == "tower":
        norm, _, width = mod.partition(" ")
        sizes = (int(width),) * 4 if width else _TOWER
        return Tower(cast(nn.NormName, norm), sizes), lambda m: ((m, sizes[0]),)
    if mod not in ("", "plain", "all", *MODS):
        raise ValueError(f"{name!r}: {mod!r} is none of plain, all, {', '.join(MODS)}.")
    config = get_config(f"fp8_{config_name}")
    model = config.model.clone(recipe="bf16")
    if config_name != "mlperf_dcnv2":
        model = model.clone(activation="swish")
        mod = mod or "all"
    for key in MODS if mod == "all" else (mod,):
        model = model.clone(**MODS.get(key, {}))
    fields, dim = len(config.data.rows), config.embedding.dim
    return model, lambda m: ((m, NUM_DENSE), (m, fields, dim))


def forced(model, sites, choice: str) -> nn.Planned:
    """Returns a model by XLA alone, a choice at some sites, bfloat16 elsewhere."""
    choices = tuple((site.path, Choice.parse(choice)) for site in sites)
    others = model.clone(recipe="bf16", implementation="xla")
    return nn.Planned(others, choices)


def passes_torchao(recipe: str, k: int, n: int) -> bool:
    """Returns True if torchao's automatic filter converts a (k, n) weight."""
    if k % 16 or n % 16:
        return False
    if recipe == "fp8_rowwise":
        return not (n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048))
    return not (k <= 4096 and n <= 1024)


def make_inputs(shapes, seed: int) -> tuple:
    """Returns normal bfloat16 inputs of these shapes."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )


def initialized(planned: nn.Planned, inputs, params: Any = None) -> dict[str, Any]:
    """Returns variables whose delayed scales are set.

    Args:
        planned: the model.
        inputs: of the model.
        params: its parameters; None to draw them.
    """
    options = untuned_here()

    def init(*inputs):
        variables = dict(planned.init(jax.random.key(0), *inputs))
        if params is not None:
            del variables["params"]
        return variables

    variables = jax.jit(init, compiler_options=options)(*inputs)
    if params is not None:
        variables["params"] = params
    if planned.is_delayed:
        # Without the other gradients: those of a wide model are gigabytes.
        def states(variables, *inputs):
            _, (grads, _) = train_pass(planned, variables, *inputs)
            return grads[OVERWRITE_WITH_GRADIENT]

        set_scales = jax.jit(states, compiler_options=options)
        variables |= {OVERWRITE_WITH_GRADIENT: set_scales(variables, *inputs)}
    return variables


def train_pass(planned: nn.Planned, variables, *inputs):
    """Returns the loss, and the gradients of variables and inputs."""

    def loss(variables, inputs):
        logits = jnp.asarray(planned.apply(variables, *inputs))
        labels = (jnp.arange(logits.shape[0]) % 2).astype(logits.dtype)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, labels))

    return jax.value_and_grad(loss, argnums=(0, 1))(variables, inputs)
