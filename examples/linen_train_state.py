"""A Linen ranker under Flax's TrainState: convert, adopt FP8, train, save, restore.

    uv run python examples/linen_train_state.py

It goes on from an orbax checkpoint, and back to the model as written. FP8 pays on a GPU
that has it, and only where layers are wide: `adopt` says what it gains.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import linen
from flax.training.train_state import TrainState

from loka_jax import nn
from loka_jax.dispatch.adopt import adopt


class Ranker(linen.Module):
    """Your model, as it is."""

    @linen.compact
    def __call__(self, x):
        layers = [linen.Dense(64), linen.LayerNorm(), linen.relu, linen.Dense(32)]
        return linen.Dense(1, name="head")(linen.Sequential(layers)(x))[:, 0]


def loss_fn(variables, apply_fn, batch):
    """Returns the mean squared error."""
    x, y = batch
    return jnp.mean((apply_fn(variables, x) - y) ** 2)


@jax.jit
def train_step(state, batch):
    """Returns the next state and the loss; TrainState overwrites the FP8 scales."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
    return state.apply_gradients(grads=grads), loss


def main(steps: int = 60) -> dict[str, float]:
    """Trains the model, and returns losses by name."""
    xs = jax.random.normal(jax.random.key(1), (4, 256, 48))
    batches = [(x, jnp.tanh(x[:, 0] + x[:, 1])) for x in xs]
    model = nn.convert(Ranker(), skip="head")
    variables = jax.jit(model.init)(jax.random.key(0), xs[0])
    adopted = adopt(
        model,
        variables,
        lambda model, variables, batch: loss_fn(variables, model.apply, batch),
        batches,
    )
    model, variables, tx = adopted.model, adopted.variables, optax.adam(1e-2)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    losses = {"first": float(loss_fn(variables, model.apply, batches[0]))}
    for step in range(steps // 2):
        state, loss = train_step(state, batches[step % len(batches)])

    path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state.params)
        checkpointer.wait_until_finished()
        state = state.replace(params=checkpointer.restore(path, state.params))
    for step in range(steps // 2):
        state, loss = train_step(state, batches[step % len(batches)])
    losses["last"] = float(loss)
    only_params = {"params": state.params["params"]}  # what the model as written takes
    losses["as written"] = float(loss_fn(only_params, Ranker().apply, batches[0]))
    return losses


if __name__ == "__main__":
    print(main())
