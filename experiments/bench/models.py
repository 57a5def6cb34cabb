"""The models that are timed, ours and Flax's.

tower        dense layers with LayerNorm and swish, and a linear head
fp8_dlrm     the small DLRM of that configuration
mlperf_dlrm  the dense part of the MLPerf benchmark's DLRM
fp8_dcnv2    the small DCN V2 of that configuration
wide ones    those of `experiments/configs/wide.py`, see `wide`
"""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from flax import linen

from experiments.configs import get_config
from loka_jax import nn
from loka_jax.data.planted import NUM_DENSE
from loka_jax.models import Dcnv2, Dlrm, RankingModel
from loka_jax.normed import ActivationName, NormName
from loka_jax.site import Provider

TOWER_FEATURES = (512, 512, 256, 256)
DLRM = Dlrm(bottom_mlp=(64,), top_mlp=(256, 128), recipe="bf16")
MLPERF_DLRM = Dlrm(bottom_mlp=(512, 256), top_mlp=(1024, 1024, 512, 256), recipe="bf16")
DCNV2 = Dcnv2(num_cross_layers=2, deep_mlp=(256, 128), recipe="bf16")
# By name: the configurations `fp8_NAME`.
WIDE = ("mlperf_dcnv2", "wukong_m", "wukong_l", "wukong_xl", "dhen_m", "dhen_l")
# LoKA's Mods, one by one.
type Mod = Literal["no_bias", "block", "hard_swish"]
MODS: dict[str, dict[str, Any]] = {
    "no_bias": {"bias": False},
    "block": {"norm": "block"},
    "hard_swish": {"activation": "hard_swish"},
}

type Shapes = tuple[tuple[int, ...], ...]


def wide(name: str) -> tuple[RankingModel, Callable[[int], Shapes]]:
    """Returns the dense part of a wide model, and its inputs' shapes for m rows.

    Args:
        name: of `WIDE`, or another configuration `fp8_NAME`, with all Mods but for the
            MLPerf benchmark's; "NAME MOD" has one of `MODS` alone, "NAME plain" none.
            Where hard_swish is missing there is swish, which it replaces.

    Raises:
        ValueError: if there is no such configuration or Mod.
    """
    config_name, _, mod = name.partition(" ")
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


def wide_names() -> list[str]:
    """Returns the names that `wide` takes."""
    mods = ("", " plain", *(f" {mod}" for mod in MODS))
    return [f"{name}{mod}" for name in WIDE for mod in mods]


class Tower(linen.Module):
    """The tower in a recipe, from float32 rows to float32 logits.

    Attributes:
        features: widths of the layers.
        recipe: of their sites.
        implementation: "xla" for XLA alone; None for kernels where they serve.
        norm, activation: of every layer.
    """

    features: tuple[int, ...] = TOWER_FEATURES
    recipe: str = "bf16"
    implementation: Provider | None = None
    norm: NormName = "layer"
    activation: ActivationName = "swish"

    @linen.compact
    def __call__(self, x):
        """Returns a logit a row."""
        x = nn.Mlp(
            self.features,
            recipe=self.recipe,
            norm=self.norm,
            activation=self.activation,
            implementation=self.implementation,
            name="tower",
        )(x.astype(jnp.bfloat16))
        return nn.Dense(1, recipe="f32", name="head")(x)[:, 0]


class WithHead(linen.Module):
    """Layers of any kind and Flax's linear head in bfloat16."""

    layers: linen.Module

    @linen.compact
    def __call__(self, x):
        """Returns a float32 logit a row."""
        logits = linen.Dense(1, dtype=jnp.bfloat16, name="head")(self.layers(x))
        return logits[:, 0].astype(jnp.float32)


class FlaxMlp(linen.Module):
    """`nn.Mlp` as Flax users write it.

    Attributes:
        features: widths of the layers.
        norm: "layer" or "none".
        activation: after every layer.
        use_bias: add a bias before the norm, as Flax does by default.
        is_fp8: use Flax's FP8 op in layers whose sizes allow it.
    """

    features: tuple[int, ...]
    norm: str = "none"
    activation: nn.ActivationName = "relu"
    use_bias: bool = True
    is_fp8: bool = True

    @linen.compact
    def __call__(self, x, *, train: bool = False):
        """Returns the last layer's activations."""
        for i, features in enumerate(self.features):
            fits = x.shape[-1] % 16 == 0 and features % 16 == 0
            x = linen.Dense(
                features,
                use_bias=self.use_bias,
                dtype=jnp.bfloat16,
                dot_general_cls=(
                    linen.Fp8DirectDotGeneralOp if self.is_fp8 and fits else None
                ),
                name=f"dense_{i}",
            )(x)
            if self.norm == "layer":
                x = linen.LayerNorm(dtype=jnp.bfloat16, name=f"norm_{i}")(x)
            x = nn.activation(self.activation)(x)
        return x
