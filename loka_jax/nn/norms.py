"""Norms and activations by name, BlockNorm, and bounds of queries and keys."""

from collections.abc import Callable, Collection
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from loka_jax import xla
from loka_jax.normed import NORM_BLOCK, ActivationName

NormName = Literal["none", "layer", "rms", "block", "batch"]
QkNormName = Literal["none", "rms", "tanh"]


class BlockNorm(linen.Module):
    """Parameter-free RMSNorm over blocks of the last dim.

    For each block b of `block` features: `y = x / sqrt(mean(x_b^2) + epsilon)`,
    statistics in float32. The last block may be smaller; it divides by its own size.
    One outlier rescales its block only, and the statistics are local to an output tile
    of a GEMM, so the norm can be fused there.

    Attributes:
        block: features that share a statistic.
        dtype: of the result; the input's if None.

    References:
        LoKA, arXiv 2605.10886, section on Mods.
    """

    block: int = NORM_BLOCK
    epsilon: float = 1e-6
    dtype: DTypeLike | None = None

    @linen.compact
    def __call__(self, x: Float[Array, "... n"]) -> Float[Array, "... n"]:
        """Returns `x`, every block of its last dim scaled to unit mean square."""
        n = x.shape[-1]
        dtype = self.dtype or x.dtype
        whole = n - n % self.block
        parts = []
        if whole:
            blocks = x[..., :whole].reshape(
                *x.shape[:-1], whole // self.block, self.block
            )
            parts.append(self._unit_rms(blocks).reshape(*x.shape[:-1], whole))
        if whole < n:
            parts.append(self._unit_rms(x[..., whole:]))
        return jnp.concatenate(parts, axis=-1).astype(dtype)

    def _unit_rms(self, x: Array) -> Array:
        x = x.astype(jnp.float32)
        mean_square = jnp.mean(x**2, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean_square + self.epsilon)


class QkNorm(linen.Module):
    """A bound on queries or keys, and so on the logits of an attention.

        rms    y = x / sqrt(mean(x^2) + epsilon)    of each head, without a learned gain
        tanh   y = tanh(alpha x)                    alpha is learned, 1/2 at the start

    References:
        FOG, arXiv 2505.20524; for tanh, DyT, arXiv 2503.10622.
    """

    norm: QkNormName

    @linen.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Returns the queries or keys of heads of d columns, bounded.

        Raises:
            ValueError: if there is no norm of that name.
        """
        check_choice("qk_norm", self.norm, get_args(QkNormName))
        if self.norm == "none":
            return x
        if self.norm == "rms":
            return BlockNorm(block=x.shape[-1])(x)
        initial = linen.initializers.constant(0.5)
        alpha = self.param("alpha", initial, (), jnp.float32)
        return jnp.tanh(alpha * x.astype(jnp.float32)).astype(x.dtype)


def activation(name: ActivationName) -> Callable[[Array], Array]:
    """Returns the activation function of that name.

    Raises:
        ValueError: if there is none of that name.
    """
    check_choice("activation", name, xla.ACTIVATIONS)
    return xla.ACTIVATIONS[name]


def check_choice(attribute: str, value: Any, choices: Collection[Any]) -> None:
    """Checks an attribute of a module that is one of several.

    Raises:
        ValueError: if it is none of them.
    """
    if value not in choices:
        raise ValueError(
            f"unknown {attribute} {value!r}: use {', '.join(map(str, choices))}."
        )


def normalize(
    x: Float[Array, "... n"],
    norm: NormName,
    *,
    train: bool,
    use_bias: bool = True,
    gain: float = 1.0,
    name: str | None = None,
) -> Float[Array, "... n"]:
    """Returns `x` normalized; to be called inside a compact Flax module.

    Args:
        norm: "layer", "rms", "block", "batch" or "none". Batch norm keeps running
            moments in the collection `batch_stats`.
        train: use this batch's moments and update the running ones (batch norm only).
        use_bias: add a learned shift ("layer" and "batch" only).
        gain: the learned scale at the start ("rms" only).

    Raises:
        ValueError: if there is no norm of that name.
    """
    match norm:
        case "none":
            return x
        case "layer":
            module = linen.LayerNorm(dtype=x.dtype, use_bias=use_bias, name=name)
        case "rms":
            scale_init = linen.initializers.constant(gain)
            module = linen.RMSNorm(dtype=x.dtype, scale_init=scale_init, name=name)
        case "block":
            module = BlockNorm(name=name)
        case "batch":
            module = linen.BatchNorm(
                use_running_average=not train,
                momentum=0.9,
                dtype=x.dtype,
                use_bias=use_bias,
                name=name,
            )
        case _:
            raise ValueError(
                f"unknown norm {norm!r}: use layer, rms, block, batch or none."
            )
    # Flax's norms promote bfloat16 to float32 inside, which strict promotion forbids.
    with jax.numpy_dtype_promotion("standard"):
        return module(x)
