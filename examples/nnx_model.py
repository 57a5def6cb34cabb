"""An NNX transformer block: convert, adopt FP8, train, save, restore.

    uv run python examples/nnx_model.py

FP8 pays on a GPU that has it, and only where layers are wide: `adopt` says what it
gains.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx

from loka_jax import nn
from loka_jax.dispatch.adopt import adopt


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


def loss_fn(model, batch):
    """Returns the mean squared error."""
    x, y = batch
    return jnp.mean((model(x) - y) ** 2)


WRT = nnx.DiffState(0, nnx.Any(nnx.Param, nn.Fp8State))


@nnx.jit
def train_step(model, optimizer, batch):
    """Updates parameters by their gradients; FP8 scales are overwritten by theirs."""
    loss, grads = nnx.value_and_grad(loss_fn, argnums=WRT)(model, batch)
    optimizer.update(model, nn.take_scaling(model, grads))
    return loss


def main(steps: int = 60) -> dict[str, float]:
    """Trains the model, and returns losses by name."""
    xs = jax.random.normal(jax.random.key(1), (4, 16, 16, 32))
    batches = [(x, jnp.tanh(x[..., 0] + x[..., 1])) for x in xs]
    written = Block(nnx.Rngs(0))
    model = nn.convert(written, skip="head")
    model = adopt(model, None, loss_fn, batches).model
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = {"first": float(loss_fn(model, batches[0]))}
    for step in range(steps):
        train_step(model, optimizer, batches[step % len(batches)])
    with ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
        checkpointer.save(path, nnx.state(model))
        checkpointer.wait_until_finished()
        nnx.update(model, checkpointer.restore(path, nnx.state(model)))
    losses["last"] = float(loss_fn(model, batches[0]))
    nnx.update(written, nnx.state(model, nnx.Param))  # the model as written takes them
    losses["as written"] = float(loss_fn(written, batches[0]))
    return losses


if __name__ == "__main__":
    print(main())
