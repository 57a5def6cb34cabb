"""A Linen ranker under Flax's TrainState: train, save, restore, convert, tune.

    uv run python examples/linen_train_state.py

It trains in FP8 with delayed scales, goes on from an orbax checkpoint, and goes back to
the model as written. Tuning measures kernels, so that it needs a GPU with FP8.
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
from loka_jax.dispatch.at_start import tune_at_start
from loka_jax.dispatch.plan import make_plan


class Ranker(linen.Module):
    """Your model, as it is."""

    @linen.compact
    def __call__(self, x):
        layers = [linen.Dense(64), linen.LayerNorm(), linen.relu, linen.Dense(32)]
        return linen.Dense(1, name="head")(linen.Sequential(layers)(x))[:, 0]


def loss_fn(variables, apply_fn, x, y):
    """Returns the mean squared error."""
    return jnp.mean((apply_fn(variables, x) - y) ** 2)


@jax.jit
def train_step(state, x, y):
    """Returns the next state and the loss; TrainState overwrites the FP8 scales."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, x, y)
    return state.apply_gradients(grads=grads), loss


def main(steps: int = 60) -> dict[str, float]:
    """Trains the model, and returns losses by name."""
    x = jax.random.normal(jax.random.key(1), (256, 48))
    y = jnp.tanh(x[:, 0] + x[:, 1])
    model = nn.convert(Ranker(), recipe="fp8_tensorwise_delayed", skip="head")
    for site in nn.list_sites(model, x):
        print(site.path, site.spec, site.runs["fwd"], site.why_not or "")

    variables = jax.jit(model.init)(jax.random.key(0), x)  # all of them: FP8 scales too
    tx = optax.adam(1e-2)
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    losses = {"first": float(loss_fn(variables, model.apply, x, y))}
    for _ in range(steps // 2):
        state, loss = train_step(state, x, y)

    path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state.params)
        checkpointer.wait_until_finished()
        state = state.replace(params=checkpointer.restore(path, state.params))
    for _ in range(steps // 2):
        state, loss = train_step(state, x, y)
    losses["last"] = float(loss)
    only_params = {"params": state.params["params"]}  # what the model as written takes
    losses["as written"] = float(loss_fn(only_params, Ranker().apply, x, y))

    sites = nn.list_sites(model, x)
    plan = make_plan(sites, tune_at_start(sites, 60.0).performance)  # empty on a CPU
    planned = nn.Planned(model, plan.choices)
    losses["planned"] = float(loss_fn(state.params, planned.apply, x, y))
    print(losses)
    return losses


if __name__ == "__main__":
    main()
