"""An NNX transformer block: train, save, restore, convert, tune.

    uv run python examples/nnx_model.py

Tuning measures kernels, so that it needs a GPU with FP8.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from loka_jax import nn
from loka_jax.dispatch.at_start import tune_at_start
from loka_jax.dispatch.plan import make_plan


class Block(nnx.Module):
    """Your model, as it is."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.head = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return self.head(nnx.gelu(self.up(x)))[..., 0]


def loss_fn(model, x, y):
    """Returns the mean squared error."""
    return jnp.mean((model(x) - y) ** 2)


WRT = nnx.DiffState(0, nnx.Any(nnx.Param, nn.Fp8State))


@nnx.jit
def train_step(model, optimizer, x, y):
    """Updates parameters by their gradients; FP8 scales are overwritten by theirs."""
    loss, grads = nnx.value_and_grad(loss_fn, argnums=WRT)(model, x, y)
    optimizer.update(model, nn.take_scaling(model, grads))
    return loss


def main(steps: int = 60) -> dict[str, float]:
    """Trains the model, and returns losses by name."""
    x = jax.random.normal(jax.random.key(1), (16, 16, 32))
    y = jnp.tanh(x[..., 0] + x[..., 1])
    written = Block(nnx.Rngs(0))
    model = nn.convert(written, x, recipe="fp8_tensorwise_delayed", skip="head")
    sites = nn.list_sites(model, x)
    print(*(f"{site.path}: {site.spec}" for site in sites), sep="\n")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = {"first": float(loss_fn(model, x, y))}
    for _ in range(steps):
        train_step(model, optimizer, x, y)
    with ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
        checkpointer.save(path, nnx.state(model))
        checkpointer.wait_until_finished()
        nnx.update(model, checkpointer.restore(path, nnx.state(model)))
    losses["last"] = float(loss_fn(model, x, y))
    nnx.update(written, nnx.state(model, nnx.Param))  # the model as written takes them
    losses["as written"] = float(loss_fn(written, x, y))

    plan = make_plan(sites, tune_at_start(sites, 60.0).performance)  # empty on a CPU
    with nn.overriding(dict(plan.choices)):
        losses["planned"] = float(loss_fn(model, x, y))
    return losses


if __name__ == "__main__":
    print(main())
