"""Equations that the models share, in numpy, and models compared with theirs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from loka_jax import nn
from tests import support

B, DENSE, F, D = 32, 5, 3, 16

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "hard_swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
}


def inputs(num_dense=DENSE, batch=B, dim=D):
    """Returns dense features [B, n] and embeddings [B, F, D]."""
    return support.normal(batch, num_dense), support.normal(batch, F, dim, seed=1)


def initialized(model, *args):
    """Returns the model's variables: random parameters and states without history."""
    variables = jax.eval_shape(model.init, jax.random.key(0), *args)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), variables)
    if nn.OVERWRITE_WITH_GRADIENT in nothing:  # any factors but zero
        nothing[nn.OVERWRITE_WITH_GRADIENT] = jax.tree.map(
            lambda table: table.at[:, 0].set(1), nothing[nn.OVERWRITE_WITH_GRADIENT]
        )
    leaves, tree = jax.tree.flatten(variables["params"])
    leaves = [
        support.normal(*p.shape, seed=i) / max(p.shape[0], 1) ** 0.5
        for i, p in enumerate(leaves)
    ]
    return nothing | {"params": jax.tree.unflatten(tree, leaves)}


class Equations:
    """The parts of the models' equations, with the options of a model."""

    def __init__(self, model):
        """Takes the model; `bias` is seen in its parameters."""
        self.norm, self.act = model.norm, ACTIVATIONS[model.activation]

    def normalize(self, x, params):
        """Returns rows normalized over the last dim."""
        if self.norm == "none":
            return x
        centred = x - x.mean(-1, keepdims=True) if self.norm == "layer" else x
        # One block: tests have at most 256 columns.
        assert self.norm == "layer" or x.shape[-1] <= 256
        rms = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return centred / rms * params.get("scale", 1.0) + params.get("bias", 0.0)

    def dense(self, params, x):
        """Returns `x W + b`."""
        return x @ params["kernel"] + params.get("bias", 0.0)

    def mlp(self, params, x, ends_linear=False):
        """Returns the activations of the last layer."""
        count = sum(name.startswith("dense_") for name in params)
        for i in range(count):
            x = self.dense(params[f"dense_{i}"], x)
            if not (ends_linear and i == count - 1):
                x = self.act(self.normalize(x, params.get(f"norm_{i}", {})))
        return x

    def head(self, params, x):
        """Returns a logit a row."""
        return (x @ params["kernel"] + params["bias"])[:, 0]

    def cross_net(self, params, x0):
        """Returns the features after the cross layers."""
        x = x0
        for i in range(sum(name.startswith("u_") for name in params)):
            hidden = x @ params[f"v_{i}"]["kernel"] if f"v_{i}" in params else x
            x = x0 * self.dense(params[f"u_{i}"], hidden) + x
        return x


def padded(x):
    """Returns rows padded to a multiple of 16 columns, as few as the tests have."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))


def pairs(z):
    """Returns the dot products of all pairs of vectors."""
    n = z.shape[1]
    return np.stack(
        [np.sum(z[:, i] * z[:, j], -1) for i in range(n) for j in range(i)], axis=1
    )


def flat(x):
    """Returns the embeddings of each example one after the other."""
    return x.reshape(len(x), -1)


def assert_follows(model, reference, args, **options):
    """Asserts that a float32 model's logits are those of its equations.

    Args:
        model: of float32.
        reference: from `Equations`, parameters, inputs and options to logits.
        args: the inputs.
        options: of the reference.
    """
    variables = initialized(model, *args)
    logits = jax.jit(model.apply)(variables, *args)
    exactly = functools.partial(np.asarray, dtype=np.float64)
    params = jax.tree.map(exactly, variables["params"])
    exact = reference(Equations(model), params, *map(exactly, args), **options)
    chex.assert_type(logits, jnp.float32)
    chex.assert_trees_all_close(
        logits, exact.astype(np.float32), rtol=1e-4, atol=1e-5 * np.abs(exact).max()
    )
