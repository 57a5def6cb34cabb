"""A Linen retriever with its own training step: microbatches, optax, checkpoints.

    uv run python examples/linen_by_hand.py

Two towers learn which item is a user's own, in microbatches. FP8 pays on a GPU that has
it, and only where layers are wide: `adopt` says what it gains.
"""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import linen

from loka_jax import nn
from loka_jax.dispatch.adopt import adopt
from loka_jax.serving import serve


class TwoTower(linen.Module):
    """Your model, as it is."""

    @linen.compact
    def __call__(self, user, item):
        user, item = linen.Dense(64)(user), linen.Dense(64)(item)
        return linen.Dense(32)(linen.relu(user)) @ linen.Dense(32)(linen.relu(item)).T


TX = nn.overwriting(optax.adam(1e-2))  # sees all but the FP8 scales


def loss_fn(model, variables, batch):
    """Returns the cross entropy of each user's own item among those of the batch."""
    logits = model.apply(variables, *batch)
    return -jnp.diagonal(jax.nn.log_softmax(logits)).mean()


@functools.partial(jax.jit, static_argnums=0)
def train_step(model, variables, opt_state, users, items):
    """Returns variables and optimizer state after a step of several microbatches."""

    def add(total, microbatch):
        grads = jax.grad(loss_fn, argnums=1)(model, variables, microbatch)
        return jax.tree.map(lambda a, b: a + b / len(users), total, grads), None

    zeros = jax.tree.map(jnp.zeros_like, variables)
    grads, _ = jax.lax.scan(add, zeros, (users, items))
    updates, opt_state = TX.update(grads, opt_state, variables)
    return optax.apply_updates(variables, updates), opt_state


def main(steps: int = 60) -> dict[str, float]:
    """Trains the model, and returns losses by name."""
    users = jax.random.normal(jax.random.key(1), (4, 64, 32))
    items = jnp.tanh(users @ jax.random.normal(jax.random.key(2), (32, 48)))
    batch = user, item = users[0], items[0]
    model = nn.convert(TwoTower())
    variables = jax.jit(model.init)(jax.random.key(0), user, item)
    adopted = adopt(model, variables, loss_fn, list(zip(users, items, strict=True)))
    model, variables = adopted.model, adopted.variables
    opt_state, first = TX.init(variables), float(loss_fn(model, variables, batch))
    for _ in range(steps):
        variables, opt_state = train_step(model, variables, opt_state, users, items)
    with ocp.StandardCheckpointer() as checkpointer:
        path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
        checkpointer.save(path, variables)
        checkpointer.wait_until_finished()
        variables = checkpointer.restore(path, variables)
    last = float(loss_fn(model, variables, batch))
    served = serve(model, variables, user, item)
    hits = jnp.argmax(served(user, item), axis=1) == jnp.arange(len(user))
    return {"first": first, "last": last, "hit rate": float(hits.mean())}


if __name__ == "__main__":
    print(main())
