"""Models as others write them, call by call, with patterns of public ones."""

from typing import Any

import jax.numpy as jnp
from flax import linen

from loka_jax.group import Group
from tests.support.nn import rounded


class Wide(linen.Module):
    """Layers wide enough to run as a group, and a head."""

    dtype: Any = None

    @linen.compact
    def __call__(self, x):
        for n in (1024, 256):
            x = linen.relu(linen.Dense(n, dtype=self.dtype)(x))
        return linen.Dense(1, name="head")(x)


class CallByCall(linen.Module):
    """A DLRM's dense part: layers by hand, features joined between two MLPs."""

    @linen.compact
    def __call__(self, x):
        for n in (64, 32):
            x = linen.relu(linen.Dense(n)(x))
        x = jnp.concatenate([x, jnp.sin(x)], axis=-1)
        for n in (64, 32):
            x = linen.relu(linen.Dense(n)(x))
        return linen.Dense(1, name="head")(x)[:, 0]


class ResNet(linen.Module):
    """Residuals after relu, a norm after that."""

    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(32)(x))
        for _ in range(2):
            x = linen.LayerNorm()(x + linen.relu(linen.Dense(32)(x)))
        return linen.Dense(1, name="head")(x)[:, 0]


class Cross(linen.Module):
    """A cross network by products with parameters of its own."""

    @linen.compact
    def __call__(self, x):
        x0, init = x, linen.initializers.lecun_normal()
        for i in range(2):
            v = self.param(f"v_{i}", init, (32, 16))
            u = self.param(f"u_{i}", init, (16, 32))
            b = self.param(f"b_{i}", linen.initializers.normal(), (32,))
            x = x0 * (jnp.matmul(jnp.matmul(x, v), u) + b) + x
        return linen.Dense(1, name="head")(x)[:, 0]


class PreNorm(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        h = linen.LayerNorm()(x)
        x = x + linen.MultiHeadDotProductAttention(num_heads=2, name="attention")(h)
        h = linen.gelu(linen.Dense(64, name="up")(linen.LayerNorm()(x)))
        return x + linen.Dense(32, name="down")(h), None


class Transformer(linen.Module):
    @linen.compact
    def __call__(self, x):
        blocks = linen.scan(
            linen.remat(PreNorm),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = blocks(name="blocks")(x.reshape(4, 8, 32), None)
        table = linen.Embed(48, 32, name="table")
        return table.attend(linen.RMSNorm()(x)).reshape(32, 48)[:, 0]


class Gated(linen.Module):
    """Products whose one half gates the other, as GEGLU and SwiGLU are written."""

    @linen.compact
    def __call__(self, x):
        y, gate = jnp.split(linen.Dense(128, name="geglu")(x), 2, axis=-1)
        x = x + linen.Dense(32, name="down")(y * linen.gelu(gate))
        y = linen.Dense(96, use_bias=False, name="swiglu")(linen.RMSNorm()(x))
        x = linen.Dense(32, name="last")(linen.silu(y[:, :48]) * y[:, 48:])
        y, z = jnp.split(linen.Dense(32, name="bilinear")(x), 2, axis=-1)
        return linen.Dense(1, name="head")(y * z)[:, 0]


MODELS = [CallByCall(), ResNet(), Cross(), Transformer(), Gated()]
X = rounded(32, 32)


def loss(model, variables, x, **options):
    y = model.apply(variables, x, **options)
    return jnp.sum(jnp.sin(jnp.asarray(y, jnp.float32)))


def layers_of(group: Group):
    """Returns the path, norm, activation and residual of each layer of a group."""
    return [
        (
            None if layer.member is None else layer.member.path,
            layer.norm.norm,
            layer.norm.activation,
            layer.residual is not None,
        )
        for layer in group.layers
    ]
