"""A Linen retriever with its own training step: microbatches, optax, checkpoints.

    uv run python examples/linen_by_hand.py

Two towers learn which item is a user's own, in microbatches. Tuning measures kernels,
so that it needs a GPU with FP8.
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import linen

from loka_jax import nn
from loka_jax.dispatch.at_start import tune_at_start
from loka_jax.dispatch.plan import make_plan
from loka_jax.serving import serve


class TwoTower(linen.Module):
    """Your model, as it is."""

    @linen.compact
    def __call__(self, user, item):
        user, item = linen.Dense(64)(user), linen.Dense(64)(item)
        return linen.Dense(32)(linen.relu(user)) @ linen.Dense(32)(linen.relu(item)).T


MODEL = nn.convert(TwoTower(), recipe="fp8_tensorwise_delayed")
TX = nn.overwriting(optax.adam(1e-2))  # sees all but the FP8 scales


def loss_fn(variables, user, item):
    """Returns the cross entropy of each user's own item among those of the batch."""
    logits = MODEL.apply(variables, user, item)
    return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()


@jax.jit
def train_step(variables, opt_state, users, items):
    """Returns variables and optimizer state after a step of several microbatches."""

    def add(total, microbatch):
        grads = jax.grad(loss_fn)(variables, *microbatch)
        return jax.tree.map(lambda a, b: a + b / len(users), total, grads), None

    zeros = jax.tree.map(jnp.zeros_like, variables)
    grads, _ = jax.lax.scan(add, zeros, (users, items))
    updates, opt_state = TX.update(grads, opt_state, variables)
    return optax.apply_updates(variables, updates), opt_state


def main(steps: int = 60) -> dict[str, float]:
    """Trains the model, and returns losses by name."""
    users = jax.random.normal(jax.random.key(1), (4, 64, 32))
    items = jnp.tanh(users @ jax.random.normal(jax.random.key(2), (32, 48)))
    user, item = users[0], items[0]
    variables = jax.jit(MODEL.init)(jax.random.key(0), user, item)
    opt_state, first = TX.init(variables), float(loss_fn(variables, user, item))
    for _ in range(steps):
        variables, opt_state = train_step(variables, opt_state, users, items)
    with ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
        checkpointer.save(path, variables)
        checkpointer.wait_until_finished()
        variables = checkpointer.restore(path, variables)
    last = float(loss_fn(variables, user, item))
    sites = nn.list_sites(MODEL, user, item)
    plan = make_plan(sites, tune_at_start(sites, 60.0).performance, roles=("fwd",))
    served = serve(nn.Planned(MODEL, plan.choices), variables, user, item)
    hits = jnp.argmax(served(user, item), axis=1) == jnp.arange(len(user))
    return {"first": first, "last": last, "hit rate": float(hits.mean())}


if __name__ == "__main__":
    print(main())
